"""Written for another version of titan."""

# requires: titancli>=99,<100
from titancli import an_api_of_the_future

print(an_api_of_the_future)
