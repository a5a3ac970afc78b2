"""Encoders: shapes, smallest images, and what each leaf becomes."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from lightning_rl.errors import SettingError
from lightning_rl.networks.encoders import ImageEncoder, TreeEncoder, VectorEncoder
from lightning_rl.spaces import Leaf


def body(side, encoder, channels=3):
    """The shape of one image before the dense layer."""
    layers = ImageEncoder(Leaf("image", (channels, side, side)), encoder, 1).body[:-1]
    with torch.no_grad():
        return tuple(layers(torch.zeros(1, channels, side, side)).shape[1:])


@pytest.mark.parametrize(
    ("encoder", "shape"),
    [
        ("simple", (32, 9, 9)),
        ("nature_cnn", (64, 7, 7)),
        ("resnet", (32, 9, 9)),
        ("match3", (144, 80, 80)),
        ("fully_connected", (3, 84, 84)),
    ],
)
def test_encoders_reduce_an_84_by_84_image_to_the_sizes_of_the_papers(encoder, shape):
    assert body(84, encoder) == shape


@pytest.mark.parametrize(("side", "first", "last"), [(20, 4, 1), (36, 8, 3), (64, 15, 6), (84, 20, 9)])
def test_sides_of_the_simple_encoder(side, first, last):
    encoder = ImageEncoder(Leaf("image", (1, side, side)), "simple", 1).body
    image = torch.zeros(1, 1, side, side)
    assert encoder[:1](image).shape[-1] == first
    assert encoder[:3](image).shape[-1] == last


@pytest.mark.parametrize(
    ("encoder", "minimum"), [("nature_cnn", 36), ("simple", 20), ("resnet", 15), ("match3", 5), ("fully_connected", 1)]
)
def test_the_smallest_image_works_and_a_smaller_one_is_refused_with_both_sizes(encoder, minimum):
    assert TreeEncoder(Box(0, 1, (3, minimum, minimum)), encoder, 4)(torch.zeros(2, 3, minimum, minimum)).shape == (2, 4)
    if minimum > 1:
        with pytest.raises(SettingError, match=f"{encoder} reads images from {minimum} x {minimum}, got 50 x {minimum - 1}"):
            TreeEncoder(Box(0, 1, (3, 50, minimum - 1)), encoder)


@pytest.mark.parametrize(("side", "encoder"), [(84, "nature_cnn"), (35, "simple"), (19, "resnet"), (14, "match3"), (4, "fully_connected")])
def test_auto_takes_the_first_encoder_that_fits(side, encoder):
    space = Box(0, 255, (side, side, 3), np.uint8)
    auto, named = TreeEncoder(space, "auto", 2), TreeEncoder(space, encoder, 2)
    assert [p.shape for p in auto.parameters()] == [p.shape for p in named.parameters()]


@pytest.mark.parametrize("encoder", ["simple", "resnet"])
def test_height_first_width_last_and_stacked_images_give_the_same_features(encoder):
    image = torch.randint(0, 256, (5, 24, 20, 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    last = TreeEncoder(Box(0, 255, (24, 20, 2), np.uint8), encoder, 8)
    expected = last(image)
    assert (expected > 0).any()
    for shape, seen in (((2, 24, 20), image.movedim(-1, 1)), ((2, 24, 20, 1), image.movedim(-1, 1).unsqueeze(-1))):
        other = TreeEncoder(Box(0, 255, shape, np.uint8), encoder, 8)
        other.load_state_dict(last.state_dict())
        torch.testing.assert_close(other(seen), expected)


def test_a_stack_of_colour_images_has_a_channel_for_each_colour_of_each_frame():
    encoder = TreeEncoder(Box(0, 255, (4, 36, 36, 3), np.uint8), "auto", 2)
    assert encoder.leaves[0].body[0].in_channels == 12
    assert encoder(torch.zeros(5, 4, 36, 36, 3, dtype=torch.uint8)).shape == (5, 2)


def test_bytes_are_scaled_to_1_and_float_images_are_not():
    image = torch.randint(0, 256, (4, 3, 20, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    bytes_, reals = TreeEncoder(Box(0, 255, (3, 20, 20), np.uint8), features=8), TreeEncoder(Box(0, 1, (3, 20, 20)), features=8)
    reals.load_state_dict(bytes_.state_dict())
    assert (bytes_(image) > 0).any()
    torch.testing.assert_close(bytes_(image), reals(image.float() / 255))


@pytest.mark.parametrize("batch", [(3,), (2, 3), (2, 1, 3)])
def test_every_leading_dimension_is_a_batch(batch):
    space = Dict(camera=Box(0, 255, (20, 20, 3), np.uint8), mode=Discrete(4), body=Box(-1, 1, (2, 2)))
    encoder = TreeEncoder(space, features=8)
    rows = torch.Size(batch).numel()
    obs = {
        "camera": torch.randint(0, 256, (rows, 20, 20, 3), dtype=torch.uint8),
        "mode": torch.arange(rows) % 4,
        "body": torch.randn(rows, 2, 2),
    }
    assert encoder.num_features == 8 + 4 + 4
    features = encoder({key: leaf.unflatten(0, batch) for key, leaf in obs.items()})
    torch.testing.assert_close(features, encoder(obs).unflatten(0, batch))


@pytest.mark.parametrize(
    ("space", "obs", "features"),
    [
        (Discrete(3, start=-1), [-1, 1], [[1, 0, 0], [0, 0, 1]]),
        (MultiDiscrete([2, 3], start=[0, 5]), [[1, 5], [0, 7]], [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]),
        (MultiDiscrete([[2, 2], [2, 3]]), [[[1, 0], [0, 2]]], [[0, 1, 1, 0, 1, 0, 0, 0, 1]]),
        (MultiBinary([2, 2]), [[[1, 0], [0, 1]]], [[1, 0, 0, 1]]),
        (Box(0, 255, (3,), np.uint8), np.array([[0, 51, 255]], np.uint8), [[0, 0.2, 1]]),
        (Box(-9, 9, (2,), np.int32), [[-3, 4]], [[-3, 4]]),
        (Box(-1, 1, (2, 2), np.float32), np.array([[[0.5, 1], [-1, 0]]], np.float32), [[0.5, 1, -1, 0]]),
        (Box(-1, 1, (), np.float32), np.array([0.5, -1], np.float32), [[0.5], [-1]]),
    ],
)
def test_vectors_are_flattened_and_choices_become_one_hot(space, obs, features):
    encoder = TreeEncoder(space)
    encoded = encoder(torch.as_tensor(obs))
    assert encoded.dtype == torch.float32
    torch.testing.assert_close(encoded, torch.tensor(features, dtype=torch.float32))
    assert encoder.num_features == len(features[0])
    assert not list(encoder.parameters())


def test_mlp_flattens_an_image_without_parameters():
    encoder = TreeEncoder(Box(0, 255, (2, 2, 3), np.uint8), "mlp")
    assert encoder(torch.full((5, 2, 2, 3), 51, dtype=torch.uint8)).tolist() == [[pytest.approx(0.2)] * 12] * 5


@pytest.mark.parametrize("cls", [dict, OrderedDict])
def test_a_dict_is_read_by_its_keys_whatever_their_order(cls):
    space = Dict(cls(b=Tuple([Box(-9, 9, (2,)), Discrete(2)]), a=Box(-9, 9, (1,))))
    a, b = torch.tensor([[1.0]]), (torch.tensor([[2.0, 3.0]]), torch.tensor([1]))
    for obs in ({"a": a, "b": b}, {"b": b, "a": a}):
        assert TreeEncoder(space)(obs).tolist() == [[1, 2, 3, 0, 1]]


def crowd(*batch):
    generator = torch.Generator().manual_seed(0)
    return {
        "agents": torch.randn(*batch, 4, 2, generator=generator),
        "body": torch.randn(*batch, 3, generator=generator),
        "map": torch.rand(*batch, 8, 8, 1, generator=generator),
        "sight": {
            "camera": torch.randint(0, 256, (*batch, 20, 20, 3), generator=generator, dtype=torch.uint8),
            "compass": torch.randn(*batch, 2, generator=generator),
        },
    }


CROWD = Dict(
    agents=Box(-9, 9, (4, 2)),
    body=Box(-9, 9, (3,)),
    map=Box(0, 1, (8, 8, 1)),
    sight=Dict(camera=Box(0, 255, (20, 20, 3), np.uint8), compass=Box(-9, 9, (2,))),
)


def test_each_image_and_vector_of_a_nested_space_has_its_own_encoder():
    encoder, obs = TreeEncoder(CROWD, features=8), crowd(5)
    kinds = [VectorEncoder, VectorEncoder, ImageEncoder, ImageEncoder, VectorEncoder]
    assert [type(leaf) for leaf in encoder.leaves] == kinds
    # match3 for 8 x 8, simple for 20 x 20
    assert [encoder.leaves[i].body[0].weight.shape for i in (2, 3)] == [(35, 1, 3, 3), (16, 3, 8, 8)]
    parts = [obs["agents"].flatten(1), obs["body"], encoder.leaves[2](obs["map"])]
    parts += [encoder.leaves[3](obs["sight"]["camera"]), obs["sight"]["compass"]]
    assert torch.equal(encoder(obs), torch.cat(parts, -1))
    assert encoder.num_features == 8 + 3 + 8 + 8 + 2 and encoder.goal == slice(29, 29)


def test_the_features_of_goals_come_last_in_the_order_of_the_leaves():
    plain, goals = TreeEncoder(CROWD, features=8), TreeEncoder(CROWD, features=8, goals=["sight.camera", "body"])
    goals.load_state_dict(plain.state_dict())
    obs = crowd(5)
    agents, body, picture, camera, compass = plain(obs).split([8, 3, 8, 8, 2], -1)
    assert torch.equal(goals(obs), torch.cat([agents, picture, compass, body, camera], -1))
    assert (goals.num_features, goals.num_goal_features, goals.goal) == (29, 11, slice(18, 29))


def test_sets_of_entities_are_summarized_given_the_features_of_everything_else():
    encoder, obs = TreeEncoder(CROWD, features=8, entities=["agents"], goals=["body"]), crowd(2, 3)
    others = [encoder.leaves[2](obs["map"]), encoder.leaves[3](obs["sight"]["camera"]), obs["sight"]["compass"], obs["body"]]
    assert encoder.num_features == 128 + 8 + 8 + 2 + 3 and encoder.goal == slice(146, 149)
    features = encoder(obs)
    assert torch.equal(features[..., 128:], torch.cat(others, -1))
    assert torch.equal(features[..., :128], encoder.attention([obs["agents"]], others))
    shuffled = encoder(obs | {"agents": obs["agents"][..., [3, 0, 2, 1], :]})
    torch.testing.assert_close(shuffled, features, rtol=0, atol=1e-6)


def test_several_sets_of_entities_have_their_own_embeddings_wherever_they_are():
    names = ["sight.compasses", "agents"]
    space = Dict(agents=CROWD["agents"], body=CROWD["body"], sight=Dict(compasses=Box(-9, 9, (5, 3))))
    encoder, compasses = TreeEncoder(space, entities=names), torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    obs = {"agents": crowd(2)["agents"], "body": crowd(2)["body"], "sight": {"compasses": compasses}}
    summary = encoder.attention([obs["agents"], compasses], [obs["body"]])
    assert torch.equal(encoder(obs), torch.cat([summary, obs["body"]], -1))
    assert [embedding.in_features for embedding in encoder.attention.embeddings] == [2 + 128, 3 + 128]


def test_entities_may_be_the_whole_observation():
    encoder, entities = TreeEncoder(Box(-9, 9, (4, 2)), entities=["obs"]), crowd(5)["agents"]
    assert not encoder.is_vector and (encoder.num_features, encoder.num_goal_features) == (128, 0)
    assert torch.equal(encoder(entities), encoder.attention([entities], []))


def test_a_misspelt_encoder_is_refused():
    with pytest.raises(SettingError, match="did you mean resnet"):
        TreeEncoder(Box(0, 1, (84, 84, 3)), "resent")


def plain(encoder, image):
    """What an image encoder computes, in the order of its dimensions and all at once."""
    image = image.flatten(0, -1 - encoder.dims)
    if encoder.channels_last:
        image = image.movedim(-1, -3)
    image = image.flatten(1, 2) if encoder.dims == 4 else image
    return encoder.linear(encoder.body((image.float() * encoder.scale).contiguous())).relu()


@pytest.mark.parametrize("encoder", ["nature_cnn", "simple", "resnet", "match3", "fully_connected"])
@pytest.mark.parametrize("shape", [(4, 40, 36), (40, 36, 3), (2, 40, 36, 3)])
def test_images_with_their_channels_last_in_memory_give_the_same_features_and_gradients(encoder, shape):
    torch.manual_seed(0)
    network = TreeEncoder(Box(0, 255, shape, np.uint8), encoder, 8).leaves[0]
    image = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8)
    weight = torch.randn(6, 8)

    def gradients(features):
        return torch.autograd.grad((features.flatten(0, -2) * weight).sum(), list(network.parameters()))

    expected, found = plain(network, image), network(image)
    largest = expected.abs().max().item()
    assert (expected > 0).any() and found.shape == (2, 3, 8)
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-5, atol=1e-5 * largest)
    for gradient, other in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


def test_many_images_are_encoded_in_groups_where_no_gradient_is_needed():
    network = TreeEncoder(Box(0, 255, (20, 20, 3), np.uint8), "simple", 8)
    image, seen = torch.randint(0, 256, (2, 70, 20, 20, 3), dtype=torch.uint8), []
    network.leaves[0].body[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    whole = network(image)
    with torch.no_grad():
        parts = network(image)
        assert network(image[:, :0]).shape == (2, 0, 8)
    assert seen == [140, 64, 64, 12, 0]
    torch.testing.assert_close(parts, whole)


def test_float_images_are_not_changed():
    image = torch.rand(2, 20, 20, 3)
    before = image.clone()
    TreeEncoder(Box(0, 1, (20, 20, 3)), "simple", 4)(image)
    assert torch.equal(image, before)
