"""haliax, the named axes under levanter: attention over named axes, trained, its arrays sharded by `hax.shard`."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax

Batch, Position, Embed = hax.make_axes(batch=8, position=16, embed=32)
Head, HeadSize, Mlp = hax.make_axes(head=4, head_size=8, mlp=64)
Key = Position.alias("key_position")


class Attention(eqx.Module):
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    out: hnn.Linear

    @staticmethod
    def init(key):
        keys = jax.random.split(key, 4)
        inner = (Head, HeadSize)
        made = [hnn.Linear.init(In=Embed, Out=inner, key=k, use_bias=False) for k in keys[:3]]
        return Attention(*made, hnn.Linear.init(In=inner, Out=Embed, key=keys[3], use_bias=False))

    def __call__(self, x):
        query, key, value = self.query(x), self.key(x).rename({"position": "key_position"}), self.value(x)
        value = value.rename({"position": "key_position"})
        weights = hnn.softmax(hax.dot(query, key, axis=HeadSize) / 8**0.5, axis=Key)
        return self.out(hax.dot(weights, value, axis=Key))


def main(placed, batched):
    model = Attention.init(jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)
    x = jax.tree.map(batched, hax.random.normal(jax.random.key(1), (Batch, Position, Embed)))

    @jax.jit
    def train_step(arrays, x):
        def loss_of(arrays):
            return hax.mean(eqx.combine(arrays, rest)(x) ** 2).scalar()

        loss, gradients = jax.value_and_grad(loss_of)(arrays)
        return jax.tree.map(lambda a, g: a - 0.1 * g, arrays, gradients), loss

    arrays = placed(arrays)
    for _ in range(3):
        arrays, loss = train_step(arrays, x)
    return loss, jax.tree.leaves(arrays)
