"""Define what the builder of each kind is called with, and what it must return.

Every builder is called as `build(config, **runtime)`, where `runtime` are the keyword arguments of the
kind's Protocol; it gets nothing else from the recipe. Required members are in the Protocols; optional
members are declared in classes of defaults: `titancli.build` fills in those that a component lacks.

Import the names from here. The files: `model`, `hf` (its Hugging Face form), `data`, `transforms`
(converters, parallelize), `training` (losses, optimizers, schedules), `run` (loops, launchers, loggers),
`callback`, `dispatch`, `store`, `rl`.
"""

from titancli.protocols.callback import (
    Callback,
    CallbackBuilder,
    RunHook,
    RunHookDefaults,
    StepHook,
    StepHookDefaults,
)
from titancli.protocols.copies import Copies, CopiesBuilder
from titancli.protocols.data import (
    Dataset,
    DatasetBuilder,
    DatasetDefaults,
    Tokenizer,
    TokenizerBuilder,
    TokenizerDefaults,
)
from titancli.protocols.dispatch import Dispatcher, DispatcherBuilder, Visit
from titancli.protocols.hf import HFBuilder, HFBuilderDefaults, HFForm, HFFormDefaults
from titancli.protocols.model import (
    Cache,
    CacheDefaults,
    Model,
    ModelBuilder,
    ModelConfig,
    ModelDefaults,
    ModuleDefaults,
    Role,
    Routing,
)
from titancli.protocols.rl import (
    Advantage,
    AdvantageBuilder,
    AdvantageDefaults,
    Generator,
    GeneratorBuilder,
    GeneratorDefaults,
    Reward,
    RewardBuilder,
    Task,
    TaskBuilder,
    TaskDefaults,
)
from titancli.protocols.run import LauncherBuilder, Logger, LoggerBuilder, LoopBuilder
from titancli.protocols.store import Entry, Store, StoreBuilder, StoreDefaults
from titancli.protocols.training import (
    Loss,
    LossBuilder,
    LossDefaults,
    OptimizerBuilder,
    OptimizerConfig,
    Schedule,
    ScheduleBuilder,
)
from titancli.protocols.transforms import (
    Converter,
    ConverterBuilder,
    ConverterDefaults,
    ParallelizeBuilder,
    Precision,
)

__all__ = [
    "Advantage",
    "AdvantageBuilder",
    "AdvantageDefaults",
    "Cache",
    "CacheDefaults",
    "Callback",
    "CallbackBuilder",
    "Converter",
    "ConverterBuilder",
    "ConverterDefaults",
    "Copies",
    "CopiesBuilder",
    "Dataset",
    "DatasetBuilder",
    "DatasetDefaults",
    "Dispatcher",
    "DispatcherBuilder",
    "Entry",
    "Generator",
    "GeneratorBuilder",
    "GeneratorDefaults",
    "HFBuilder",
    "HFBuilderDefaults",
    "HFForm",
    "HFFormDefaults",
    "LauncherBuilder",
    "Logger",
    "LoggerBuilder",
    "LoopBuilder",
    "Loss",
    "LossBuilder",
    "LossDefaults",
    "Model",
    "ModelBuilder",
    "ModelConfig",
    "ModelDefaults",
    "ModuleDefaults",
    "OptimizerBuilder",
    "OptimizerConfig",
    "ParallelizeBuilder",
    "Precision",
    "Reward",
    "RewardBuilder",
    "Role",
    "Routing",
    "RunHook",
    "RunHookDefaults",
    "Schedule",
    "ScheduleBuilder",
    "StepHook",
    "StepHookDefaults",
    "Store",
    "StoreBuilder",
    "StoreDefaults",
    "Task",
    "TaskBuilder",
    "TaskDefaults",
    "Tokenizer",
    "TokenizerBuilder",
    "TokenizerDefaults",
    "Visit",
]
