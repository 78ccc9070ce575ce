"""Different things have different names, whatever they are."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from kvfleet import copying
from kvfleet.core.block import KEY_BYTES, Identity, chain_keys, encode_fields, namespace_id, split
from kvfleet.core.layout import ITEMSIZES, BlockLayout

# Few characters, so that values collide often and only their boundaries tell them apart.
texts = st.text(st.sampled_from(["a", "b", "\0", "é"]), max_size=4)
secrets = st.none() | st.binary(min_size=1, max_size=3)
identities = st.builds(
    Identity,
    tenant=texts,
    salt=texts,
    model_id=texts,
    weight_revision=texts,
    adapter_id=texts,
    adapter_revision=texts,
    layout_fingerprint=st.binary(max_size=2),
    block_tokens=st.integers(1, 3),
    tenant_secret=secrets,
)
sequences = st.lists(st.tuples(texts, texts | st.binary(max_size=4) | st.integers(-2, 2)), max_size=4)
token_ids = st.lists(st.integers(0, 2), max_size=12)


@given(sequences, sequences)
def test_encodings_are_equal_only_for_equal_fields(one, other):
    same = [(tag, type(value), value) for tag, value in one] == [(tag, type(value), value) for tag, value in other]
    assert (encode_fields(one) == encode_fields(other)) == same


@given(sequences, sequences, sequences, sequences)
def test_encodings_can_be_nested(first, second, third, fourth):
    def nested(one, other):
        return encode_fields((("one", encode_fields(one)), ("other", encode_fields(other))))

    assert (nested(first, second) == nested(third, fourth)) == ((first, second) == (third, fourth))


@given(identities, identities)
def test_roots_are_equal_only_for_equal_identities(one, other):
    assert (one.root() == other.root()) == (one == other)


@given(identities, st.data())
def test_every_field_changes_the_root(identity, data):
    name = data.draw(st.sampled_from([field.name for field in fields(Identity)]))
    other = replace(identity, **{name: getattr(data.draw(identities), name)})
    assume(other != identity)
    assert other.root() != identity.root()
    assert namespace_id(other.root()) != namespace_id(identity.root())
    assert not set(split(chain_keys(other.root(), range(6), 2))) & set(split(chain_keys(identity.root(), range(6), 2)))


@st.composite
def layouts(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    axis = draw(st.none() | st.integers(0, len(shape) - 1))
    return BlockLayout(
        dtype=draw(st.sampled_from(sorted(ITEMSIZES))),
        shape=tuple(shape),
        token_axis=axis,
        inner_order=draw(texts),
        num_shards=draw(st.integers(1, 2)),
        block_tokens=draw(st.integers(1, 3)) if axis is None else shape[axis],
    )


@given(layouts(), layouts())
def test_layouts_are_told_apart(one, other):
    assert (one.fingerprint == other.fingerprint) == (one == other)
    assert (one.to_json() == other.to_json()) == (one == other)
    assert BlockLayout.from_json(one.to_json()) == one


@given(token_ids, token_ids, st.integers(1, 4), st.dictionaries(st.integers(0, 3), st.binary(max_size=2), max_size=2))
def test_keys_are_shared_as_far_as_the_prompts_are(one, other, block_tokens, extra):
    root = bytes(32)
    blocks_of_one, blocks_of_other = (
        [
            (tokens[at : at + block_tokens], extra.get(at // block_tokens))
            for at in range(0, len(tokens) - block_tokens + 1, block_tokens)
        ]
        for tokens in (one, other)
    )
    keys, other_keys = chain_keys(root, one, block_tokens, extra), chain_keys(root, other, block_tokens, extra)
    assert len(keys) == KEY_BYTES * len(blocks_of_one)
    shared = 0
    while blocks_of_one[shared : shared + 1] == blocks_of_other[shared : shared + 1] != []:
        shared += 1
    assert split(keys)[:shared] == split(other_keys)[:shared]
    assert not set(split(keys)[shared:]) & set(split(other_keys))
    without = chain_keys(root, one, block_tokens)
    first = min((index for index in extra if index < len(blocks_of_one)), default=len(blocks_of_one))
    assert [a == b for a, b in zip(split(keys), split(without), strict=True)] == [
        index < first for index in range(len(blocks_of_one))
    ]


@given(st.data())
def test_blocks_survive_any_strides(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    steps = data.draw(st.lists(st.sampled_from([1, 1, 2, -1]), min_size=len(shape), max_size=len(shape)))
    order = data.draw(st.permutations(range(len(shape))))
    dtype = data.draw(st.sampled_from(["u1", "u2", "u4", "u8"]))
    whole = np.arange(math.prod(shape) * 2 ** len(shape), dtype=dtype)
    block = whole.reshape([2 * size for size in shape])[tuple(slice(None, None, step) for step in steps)][
        tuple(slice(size) for size in shape)
    ].transpose(order)
    assert block.size == math.prod(shape)

    slot = np.zeros(block.nbytes, np.uint8)
    assert copying.copy_in(slot, block) == copying.checksum(slot)
    assert slot.tobytes() == block.tobytes()
    target = np.zeros_like(whole).reshape([2 * size for size in shape])[tuple(slice(size) for size in shape)]
    copying.copy_out(target.transpose(order), slot)
    assert np.array_equal(target.transpose(order), block)
