"""The exceptions of sdy_jax: one small tree.

`SdyError` and its subclasses report a mistake of the user; `InternalError` reports one of ours. Every message says
what was given, where (argument path, source line or MLIR location), and what would be right.
"""

from sdy_jax.base.errors import (
    ArgumentError,
    ContractError,
    DeletedArrayError,
    InternalError,
    MemoryLimitError,
    ParseError,
    PartitionWarning,
    PinnedPlanError,
    ProcessError,
    SdyError,
    ShardingError,
    UnsupportedError,
    VerificationError,
)

__all__ = [
    "ArgumentError",
    "ContractError",
    "DeletedArrayError",
    "InternalError",
    "MemoryLimitError",
    "ParseError",
    "PartitionWarning",
    "PinnedPlanError",
    "ProcessError",
    "SdyError",
    "ShardingError",
    "UnsupportedError",
    "VerificationError",
]
