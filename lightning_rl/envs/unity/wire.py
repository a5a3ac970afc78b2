"""Messages of Unity ML-Agents (protocol 1.5), built from a table of field numbers.

No code is generated, and an installed mlagents_envs does not conflict.
"""

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

PACKAGE = "communicator_objects"
METHOD = f"/{PACKAGE}.UnityToExternalProto/Exchange"
"""The only call: Unity sends what happened, and the reply is what to do."""
VERSION = "1.5.0"
STEP, RESET = 0, 1
"""Commands."""
OK, CLOSED = 200, 400
"""Status of a message."""
PNG, GOAL = 1, 1
"""A compression, and a type of observations; 0 is the other one."""
CONTINUOUS = 1
"""The old type of an action space; 0 is discrete."""

MESSAGES = {
    "HeaderProto": "1 int32 status, 2 string message",
    "UnityMessageProto": "1 HeaderProto header, 2 UnityOutputProto unity_output, 3 UnityInputProto unity_input",
    "UnityOutputProto": "1 UnityRLOutputProto rl_output, 2 UnityRLInitializationOutputProto rl_initialization_output",
    "UnityInputProto": "1 UnityRLInputProto rl_input, 2 UnityRLInitializationInputProto rl_initialization_input",
    "UnityRLInitializationInputProto": (
        "1 int32 seed, 2 string communication_version, 3 string package_version, 4 UnityRLCapabilitiesProto capabilities, 5 int32 num_areas"
    ),
    "UnityRLInitializationOutputProto": (
        "1 string name, 2 string communication_version, 3 string log_path, 5 *BrainParametersProto brain_parameters, "
        "7 string package_version, 8 UnityRLCapabilitiesProto capabilities"
    ),
    "UnityRLCapabilitiesProto": (
        "1 bool base, 2 bool concatenated_pngs, 3 bool channel_mapping, 4 bool hybrid_actions, 5 bool training_analytics, "
        "6 bool variable_length, 7 bool groups"
    ),
    "UnityRLOutputProto": "2 {}ListAgentInfoProto agent_infos, 3 bytes side_channel",
    "UnityRLInputProto": "1 {}ListAgentActionProto agent_actions, 4 int32 command, 5 bytes side_channel",
    "ListAgentInfoProto": "1 *AgentInfoProto value",
    "ListAgentActionProto": "1 *AgentActionProto value",
    "AgentInfoProto": (
        "7 float reward, 8 bool done, 9 bool max_step_reached, 10 int32 id, 11 *bool action_mask, 13 *ObservationProto observations, "
        "14 int32 group_id, 15 float group_reward"
    ),
    "AgentActionProto": "1 *float old_actions, 4 float value, 6 *float continuous_actions, 7 *int32 discrete_actions",
    "ObservationProto": (
        "1 *int32 shape, 2 int32 compression_type, 3 bytes compressed_data, 4 FloatData float_data, 5 *int32 channel_mapping, "
        "6 *int32 dimension_properties, 7 int32 observation_type, 8 string name"
    ),
    "FloatData": "1 *float data",
    "BrainParametersProto": (
        "3 *int32 old_action_size, 5 *string old_action_descriptions, 6 int32 old_space_type, 7 string brain_name, 8 bool is_training, "
        "9 ActionSpecProto action_spec"
    ),
    "ActionSpecProto": (
        "1 int32 num_continuous_actions, 2 int32 num_discrete_actions, 3 *int32 discrete_branch_sizes, 4 *string action_descriptions"
    ),
    "AgentInfoActionPairProto": "1 AgentInfoProto agent_info, 2 AgentActionProto action_info",
    "DemonstrationMetaProto": (
        "1 int32 api_version, 2 string demonstration_name, 3 int32 number_steps, 4 int32 number_episodes, 5 float mean_reward"
    ),
}
"""Fields by message: number, type (* repeated, {} a map from strings) and our name. Enums are int32, which is the same in bytes."""


@cache
def messages(raw: bool = False) -> SimpleNamespace:
    """Build the classes of all messages, in a pool of their own.

    `raw`: declare packed floats and flags as `bytes`, which is the same in bytes: `np.frombuffer` reads them and `tobytes` writes them,
    without a Python number for each. A sender that does not pack leaves such a field empty.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name=f"unity{'_raw' * raw}.proto", package=PACKAGE, syntax="proto3")
    for name in MESSAGES:
        message = file.message_type.add(name=name)
        for number, kind, is_repeated, field in fields_of(name):
            if kind.startswith("{}"):
                entry = message.nested_type.add(name="".join(map(str.capitalize, field.split("_"))) + "Entry")
                entry.options.map_entry = True
                add_field(entry, 1, "string", False, "key")
                add_field(entry, 2, kind.removeprefix("{}"), False, "value")
                kind = f"{name}.{entry.name}"
            elif raw and is_repeated and kind in ("float", "bool"):
                kind, is_repeated = "bytes", False
            add_field(message, number, kind, is_repeated, field)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in MESSAGES}
    return SimpleNamespace(**{name: message_factory.GetMessageClass(found[name]) for name in found})


def fields_of(message: str) -> Iterator[tuple[int, str, bool, str]]:
    """Yield number, type, whether it is repeated, and name of each field of a message."""
    for field in MESSAGES[message].split(", "):
        number, kind, name = field.split()
        yield int(number), kind.removeprefix("*"), kind.startswith(("*", "{}")), name


def add_field(message: Any, number: int, kind: str, is_repeated: bool, name: str) -> None:
    """Add a field to the description of a message."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    label = FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
    plain = FieldDescriptorProto.Type.keys()
    if f"TYPE_{kind.upper()}" in plain:
        message.field.add(name=name, number=number, label=label, type=f"TYPE_{kind.upper()}")
    else:
        message.field.add(name=name, number=number, label=label, type="TYPE_MESSAGE", type_name=f".{PACKAGE}.{kind}")


def make_message(content: Any = None, status: int = OK) -> bytes:
    """Return the bytes of a reply with an input, or of an empty one."""
    message = messages(raw=True).UnityMessageProto(header={"status": status})
    if content is not None:
        message.unity_input.CopyFrom(content)
    return message.SerializeToString()


def make_hello(seed: int, num_areas: int, package_version: str = "1.1.0") -> bytes:
    """Return the reply to Unity's first message. All capabilities are set: without them Unity would send other observations."""
    classes = messages(raw=True)
    capabilities = {name: True for *_, name in fields_of("UnityRLCapabilitiesProto")}
    versions = {"communication_version": VERSION, "package_version": package_version}
    hello = {"seed": seed, **versions, "capabilities": capabilities, "num_areas": num_areas}
    return make_message(classes.UnityInputProto(rl_initialization_input=hello))
