"""Messages are the bytes that mlagents_envs 1.1.0 sends and reads, and become arrays."""

import io

import numpy as np
import pytest
from PIL import Image

from lightning_rl.envs.lessons import Constant, Gaussian, MultiRangeUniform, Uniform
from lightning_rl.envs.unity import channels, wire
from lightning_rl.envs.unity.decoding import BehaviorSpec, ObservationSpec, find_dtype, read_image, read_spec, split_agents
from lightning_rl.errors import SettingError

TYPED, RAW = wire.messages(), wire.messages(raw=True)
WALKER = "Walker?team=0"
OUTPUT = (
    "0a0308c80112400a3e123c0a0d57616c6b65723f7465616d3d30122b0a293d0000c03f50035a0201006a150a0102220a0a08"
    "000000000000204032010142017670017d000080be"
)
SPEC = BehaviorSpec((ObservationSpec("v", (2,), np.dtype(np.float32), False),), 0, (2,))


def read_golden(data=OUTPUT):
    """Return the agents of the golden message that ask, and those that ended."""
    message = RAW.UnityMessageProto.FromString(bytes.fromhex(data))
    return split_agents(message.unity_output.rl_output.agent_infos[WALKER].value, SPEC, "Walker")


def png(planes):
    file = io.BytesIO()
    Image.fromarray(np.stack(planes, -1).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_an_empty_message():
    assert wire.make_message().hex() == "0a0308c801"
    assert wire.make_message(status=wire.CLOSED).hex() == "0a03089003"


def test_the_reply_to_the_hello():
    expected = "0a0308c8011a24122208071205312e352e301a05312e312e30220e08011001180120012801300138012801"
    assert wire.make_hello(seed=7, num_areas=1).hex() == expected


def test_a_reset():
    content = RAW.UnityInputProto(rl_input=RAW.UnityRLInputProto(command=wire.RESET))
    assert wire.make_message(content).hex() == "0a0308c8011a040a022001"


def test_a_step_packs_its_actions():
    content = RAW.UnityRLInputProto(command=wire.STEP)
    action = content.agent_actions[WALKER].value.add()
    action.continuous_actions = np.array([0.5, -1.0], "<f4").tobytes()
    action.discrete_actions.extend([2, 0])
    expected = "0a0308c8011a250a230a210a0d57616c6b65723f7465616d3d3012100a0e32080000003f000080bf3a020200"
    assert wire.make_message(RAW.UnityInputProto(rl_input=content)).hex() == expected


def test_an_agent_that_asks():
    asking, ended = read_golden()
    assert (asking.ids, ended.ids) == ([3], [])
    assert asking.reward.tolist() == [1.25], "its own and its group's"
    assert asking.obs[0].tolist() == [[0.0, 2.5]]
    assert asking.mask.tolist() == [[False, True]], "the wire says which are forbidden"


def test_unknown_fields_are_ignored():
    unknown = "f2c00103616263"  # field 3086 with three bytes
    asking, _ = read_golden(OUTPUT + unknown)
    assert asking.ids == [3]


def test_floats_and_flags_that_are_not_packed():
    agent = TYPED.AgentInfoProto(id=1, observations=[TYPED.ObservationProto(shape=[2], name="v")]).SerializeToString()
    floats = bytes.fromhex("2a0a" + "0d0000003f" + "0d000080bf")  # [0.5, -1] one by one, as the field of FloatData
    observation = TYPED.ObservationProto(shape=[2], name="v").SerializeToString() + b"\x22" + floats[1:]
    agent = TYPED.AgentInfoProto(id=1).SerializeToString() + b"\x58\x01\x58\x00" + b"\x6a" + bytes([len(observation)]) + observation
    asking, _ = split_agents([RAW.AgentInfoProto.FromString(agent)], SPEC, "Walker")
    assert asking.obs[0].tolist() == [[0.5, -1.0]]
    assert asking.mask.tolist() == [[False, True]]


def test_a_mask_that_is_missing_allows_everything():
    agent = RAW.AgentInfoProto.FromString(TYPED.AgentInfoProto(observations=[vector([1.0, 2.0])]).SerializeToString())
    assert split_agents([agent], SPEC, "Walker")[0].mask.tolist() == [[True, True]]


def vector(values, name="v"):
    return TYPED.ObservationProto(shape=[len(values)], float_data={"data": values}, name=name)


@pytest.mark.parametrize(
    ("observations", "words"),
    [
        ([vector([1.0, 2.0, 3.0])], r"Walker: observation v has shape \(3,\), not \(2,\)"),
        ([TYPED.ObservationProto(shape=[2], name="v")], "does not have 2 numbers"),
        ([], "has 0 observations, not 1"),
    ],
)
def test_other_observations_than_at_first(observations, words):
    agent = RAW.AgentInfoProto.FromString(TYPED.AgentInfoProto(observations=observations).SerializeToString())
    with pytest.raises(SettingError, match=words):
        split_agents([agent], SPEC, "Walker")


def test_an_empty_observation():
    spec = SPEC._replace(observations=(ObservationSpec("v", (0,), np.dtype(np.float32), False),))
    agent = RAW.AgentInfoProto.FromString(TYPED.AgentInfoProto(observations=[vector([])]).SerializeToString())
    assert split_agents([agent], spec, "Walker")[0].obs[0].shape == (1, 0)


def test_a_specification_in_the_old_fields():
    agent = RAW.AgentInfoProto()
    old = {"old_action_size": [3, 2], "old_space_type": 0}
    assert read_spec(RAW.BrainParametersProto(**old), agent).branches == (3, 2)
    assert read_spec(RAW.BrainParametersProto(old_action_size=[4], old_space_type=1), agent)[1:] == (4, ())


def test_planes_of_several_pngs_are_bytes_and_may_be_dropped():
    planes = [np.full((2, 3), value) for value in (10, 20, 30, 40, 50, 0)]
    image = read_image(png(planes[:3]) + png(planes[3:]), (5, 2, 3), [0, 1, 2, 3, 4, -1], "camera")
    assert image.dtype == np.uint8
    assert image[:, 0, 0].tolist() == [10, 20, 30, 40, 50]
    assert read_image(png(planes[:3]) + png(planes[3:]), (5, 2, 3), [], "camera").tolist() == image.tolist(), "padded without a mapping"


def test_planes_with_one_target_are_averaged_to_floats():
    planes = [np.full((2, 3), value) for value in (0, 51, 204)]
    for mapping in ([0, 0, 0], []):
        image = read_image(png(planes), (1, 2, 3), mapping, "camera")
        assert image.dtype == np.float32
        assert image.ravel() == pytest.approx([85 / 255] * 6)


def test_images_of_older_packages_have_their_channels_last():
    planes = [np.full((2, 4), value) for value in (10, 20, 30)]
    assert read_image(png(planes), (2, 4, 3), [], "camera")[0, 0].tolist() == [10, 20, 30]


def test_an_image_that_does_not_fit_is_refused():
    planes = [np.zeros((2, 3))] * 3
    for data, shape, mapping, words in (
        (png(planes), (3, 4, 3), [], "is an image of shape"),
        (png(planes), (3, 2, 3), [0, 1], "do not fit its mapping"),
        (png(planes), (3, 2, 3), [0, 2, 2], "do not fit its mapping"),
        (b"\x89PNG\r\n\x1a\nxx", (3, 2, 3), [], "is damaged"),
        (b"", (3, 2, 3), [], "is not a PNG"),
    ):
        with pytest.raises(SettingError, match=words):
            read_image(data, shape, mapping, "camera")


def test_only_pngs_whose_planes_are_not_averaged_stay_bytes():
    def kind(compression, shape, mapping=()):
        return find_dtype(TYPED.ObservationProto(shape=shape, compression_type=compression, channel_mapping=mapping))

    assert kind(wire.PNG, [3, 8, 8]) == kind(wire.PNG, [5, 8, 8], [0, 1, 2, 3, 4, -1]) == np.uint8
    assert kind(0, [3, 8, 8]) == kind(wire.PNG, [1, 8, 8], [0, 0, 0]) == kind(wire.PNG, [1, 8, 8]) == np.float32


def test_ids_of_channels():
    ids = [channel.bytes_le.hex() for channel in (channels.PARAMETERS, channels.ENGINE, channels.STATS)]
    assert ids == ["1e894c530f81ea11a9d0822485860400", "2c3451e97e4fea11b238784f4387d1f7", "b7f7d8a1c8cef950b78bd3e165a78520"]


def test_parameters_of_the_scene():
    constant = channels.make_parameter("a", Constant(1.5), 0)
    assert constant.hex() == "1e894c530f81ea11a9d08224858604000d0000000100000061000000000000c03f"
    payloads = {
        "0100000075010000000500000000000000000080bf00000040": ("u", Uniform(-1.0, 2.0, seed=5)),
        "0100000067010000000600000001000000" + "0000803f0000003f": ("g", Gaussian(1.0, 0.5, seed=6)),
        "010000006d01000000070000000200000004000000000000000000803f0000404000008040": ("m", MultiRangeUniform([[0, 1], [3, 4]], seed=7)),
    }
    for payload, (name, sampler) in payloads.items():
        assert [each[1].hex() for each in channels.read_messages(channels.make_parameter(name, sampler, 0))] == [payload]


def test_a_sampler_without_a_seed_takes_the_players():
    drawn = channels.make_parameter("u", Uniform(-1.0, 2.0), seed=5)
    assert drawn == channels.make_parameter("u", Uniform(-1.0, 2.0, seed=5), seed=0)


def test_a_parameter_that_unity_cannot_read():
    with pytest.raises(SettingError, match=r"env.parameters.größe: Unity reads ASCII names only"):
        channels.make_parameter("größe", Constant(1.0), 0)


def test_settings_of_the_engine():
    sent = channels.read_messages(channels.make_engine_settings(84, 84, time_scale=20.0))
    assert [payload.hex() for _, payload in sent] == ["000000005400000054000000", "020000000000a041"]


def test_a_statistic():
    assert channels.read_stat(bytes.fromhex("010000006b0000004002000000")) == ("k", 2.0, "sum")


def test_a_message_that_is_cut_off():
    whole = channels.make_parameter("a", Constant(1.5), 0)
    for size in (5, len(whole) - 1):
        with pytest.raises(SettingError, match="cut off"):
            list(channels.read_messages(whole[:size]))
