"""Objects that remember their hash."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

from sdy_jax.ir.meshes import Mesh, hash_once
from sdy_jax.ir.parsers import parse_sharding
from sdy_jax.ir.shardings import OpShardingRule


class _Counted:
    hashed = 0

    def __hash__(self) -> int:
        _Counted.hashed += 1
        return 7


@hash_once
@dataclass(frozen=True)
class _Pair:
    left: object
    right: object


def test_parts_are_hashed_once() -> None:
    pair = _Pair(_Counted(), 1)
    assert hash(pair) == hash(pair)
    assert _Counted.hashed == 1


def test_equal_objects_hash_alike_and_others_do_not_get_the_remembered_hash() -> None:
    one = parse_sharding('[{"a"}, {?}]', "mesh")
    assert hash(one) == hash(parse_sharding('[{"a"}, {?}]', "mesh"))
    assert hash(replace(one, mesh="other")) == hash(parse_sharding('[{"a"}, {?}]', "other"))


def test_a_remembered_hash_is_not_pickled() -> None:
    for value in (parse_sharding('[{"a"}]', "mesh"), Mesh.of(a=2), OpShardingRule((2,), (((0,),),), (((0,),),))):
        hash(value)
        copy = pickle.loads(pickle.dumps(value))
        assert "_hash" not in vars(copy)
        assert copy == value and hash(copy) == hash(value)
