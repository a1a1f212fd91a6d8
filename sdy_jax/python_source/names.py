"""Names for values: unique in a module, and no words of Python or of the module's own."""

from __future__ import annotations

import keyword
import re

_TAKEN = frozenset({"jax", "jnp", "np", "lax", "P", "MESH", "ARRAYS", "Path", "range"})
"""What modules use themselves."""

_KINDS = {
    "dot_general": "product",
    "conv_general_dilated": "convolved",
    "reduce_sum": "total",
    "reduce_max": "largest",
    "reduce_min": "least",
    "reduce": "reduced",
    "select_n": "chosen",
    "dynamic_slice": "part",
    "dynamic_update_slice": "updated",
    "slice": "part",
    "concatenate": "joined",
    "pad": "padded",
    "gather": "looked_up",
    "scatter": "scattered",
    "sort": "ordered",
    "convert_element_type": "converted",
    "reshape": "reshaped",
    "transpose": "transposed",
    "broadcast_in_dim": "broadcast",
    "iota": "counted",
    "axis_index": "index",
    "add": "total",
    "sub": "difference",
    "mul": "scaled",
    "div": "ratio",
    "abs": "magnitude",
    "pow": "power",
    "integer_pow": "power",
    "round": "rounded",
    "complex": "number",
    "neg": "negative",
    "max": "larger",
    "min": "smaller",
    "lt": "is_less",
    "gt": "is_greater",
    "eq": "is_equal",
    "and": "both",
    "or": "either",
    "xor": "differing",
    "not": "inverted",
    "while": "looped",
    "fori_loop": "looped",
    "scan": "scanned",
    "cond": "branched",
    "optimization_barrier": "after",
    "psum": "reduced",
    "pmax": "reduced",
    "pmin": "reduced",
    "stablehlo_op": "computed",
}
"""What a value is called by the primitive that makes it, where that is no good name itself."""

MOVED = {
    "all_gather": "gathered",
    "reduce_scatter": "scattered",
    "all_to_all": "exchanged",
    "ppermute": "received",
    "psum": "reduced",
}
"""What a collective makes of a value that has a name: `weights_gathered`."""


class Names:
    """The names of a module."""

    def __init__(self) -> None:
        self._used: dict[str, int] = dict.fromkeys(_TAKEN, 1)

    def fresh(self, hint: str) -> str:
        """A name that is not used yet: the hint, or the hint with a number."""
        base = identifier(hint)
        if base not in self._used:
            self._used[base] = 1
            return base
        while True:
            self._used[base] += 1
            name = f"{base}_{self._used[base]}"
            if name not in self._used:
                self._used[name] = 1
                return name


def identifier(text: str) -> str:
    """`params['w1'].scale` as `params_w1_scale`."""
    words = re.sub(r"\W+", "_", text).strip("_") or "value"
    if keyword.iskeyword(words) or words in ("l", "O", "I"):  # letters that look like digits
        return f"{words}_"
    return f"arg_{words}" if words[0].isdigit() else words


def kind_name(primitive: str) -> str:
    """The name of a value by the primitive that makes it."""
    return _KINDS.get(primitive, identifier(primitive))
