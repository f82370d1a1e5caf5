"""Cannot be imported: something that it needs is missing."""

import no_such_library

print(no_such_library)
