"""`[env]`: the environment variables that a recipe may set, and those that the command line may set."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping

from titancli.errors import nearest_name
from titancli.recipe.toml import KeyPath

_ALLOWED = (
    # threads
    "OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES OMP_DYNAMIC OMP_WAIT_POLICY KMP_AFFINITY KMP_BLOCKTIME "
    "MKL_NUM_THREADS MKL_DYNAMIC OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS RAYON_NUM_THREADS "
    "TOKENIZERS_PARALLELISM MALLOC_ARENA_MAX MALLOC_TRIM_THRESHOLD_ "
    # the network
    "NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_ALGO NCCL_PROTO NCCL_BUFFSIZE NCCL_NTHREADS NCCL_MIN_NCHANNELS "
    "NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_CGA_CLUSTER_SIZE NCCL_CROSS_NIC "
    "NCCL_LAUNCH_MODE NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD "
    "NCCL_SET_THREAD_NAME NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_P2P_DIRECT_DISABLE NCCL_SHM_DISABLE "
    "NCCL_NVLS_ENABLE NCCL_CUMEM_ENABLE NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_IB_DISABLE "
    "NCCL_IB_HCA NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT NCCL_IB_GID_INDEX NCCL_IB_ROCE_VERSION_NUM "
    "NCCL_IB_SL NCCL_IB_TC NCCL_IB_AR_THRESHOLD NCCL_IB_QPS_PER_CONNECTION NCCL_IB_SPLIT_DATA_ON_QPS "
    "NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_ADAPTIVE_ROUTING NCCL_IGNORE_CPU_AFFINITY NCCL_CHECK_POINTERS "
    "NCCL_RAS_ENABLE NCCL_MNNVL_ENABLE GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME "
    # torch and CUDA
    "TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_AVOID_RECORD_STREAMS "
    "TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_ENABLE_MONITORING "
    "TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_NAN_CHECK "
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_TRACE_BUFFER_SIZE "
    "TORCH_DISTRIBUTED_DEBUG TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES "
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF "
    "CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUBLAS_WORKSPACE_CONFIG "
    "CUBLASLT_WORKSPACE_SIZE NVIDIA_TF32_OVERRIDE "
    # libraries of Hugging Face
    "HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE HF_HUB_DOWNLOAD_TIMEOUT "
    "HF_HUB_ETAG_TIMEOUT HF_HUB_DISABLE_TELEMETRY HF_HUB_DISABLE_PROGRESS_BARS "
    "HF_DATASETS_DISABLE_PROGRESS_BARS HF_HUB_VERBOSITY TRANSFORMERS_VERBOSITY DATASETS_VERBOSITY "
)
ALLOWED = _ALLOWED.split()
"""Variables that a recipe may set: numbers, switches and names of interfaces; none of them selects code to
load, a program to start, or a file to read or write."""

SECRET = ("*_TOKEN", "*_KEY", "*SECRET*", "*PASSWORD*")
LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_*",
)
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def check_env(env: Mapping[str, str]) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield path, message and hint for each variable that a recipe may not set."""
    for name, value in env.items():
        refused = wrong_variable(name, value) or _not_allowed(name)
        if refused is not None:
            yield ("env", name), *refused


def wrong_variable(name: str, value: str) -> tuple[str, str] | None:
    """Return message and hint for a variable that may not be set, by a recipe or otherwise; None if it
    may."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return f"{name!r} is not the name of an environment variable", "write letters, digits and _"
    if "\0" in value:
        return f"the value of {name} contains a NUL", "remove it"
    if _matches(name, SECRET):
        message = f"{name} looks like a secret, and a recipe, its lock file and run.json are shared"
        return message, f"set it in the shell: export {name}=…"
    if _matches(name, LAUNCHERS):
        return f"{name} is set by the launcher", "remove it"
    if _matches(name, DEVICES):
        return f"{name} depends on the machine, not on the recipe", f"set it in the shell: export {name}=…"
    return None


def _not_allowed(name: str) -> tuple[str, str] | None:
    if name in ALLOWED:
        return None
    near = nearest_name(name, ALLOWED)
    hint = f"did you mean {near!r}? Otherwise give" if near else "give"
    message = (
        f"a recipe cannot set {name}: it is not on the list of variables that cannot select code or files"
    )
    return message, f"{hint} it on the command line: titan train … --env {name}=…"


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in patterns)
