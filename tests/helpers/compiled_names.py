"""What profilers show of compiled programs: the scopes and the source lines of instructions, from the text of HLO."""

import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r'= .*? ([\w-]+)\(.*metadata=\{op_name="((?:[^"\\]|\\.)*)"(?: stack_frame_id=(\d+))?')
_OURS = re.compile(r"/(?:bucket_\d+_)?\w+\.\w+\[[^\]/]*\] .*")


class Shown(NamedTuple):
    """An instruction: its kind, the scopes around it, and the innermost of its source lines."""

    kind: str
    scope: str
    line: str


def shown(text):
    """The instructions that say where they come from. What is sent for an op has the op's scope; what XLA makes of
    several, whose names it joins, is left out."""
    tables = dict(re.findall(r"^(\w+)\n((?:\d+ .*\n)+)", text, re.MULTILINE))
    files = dict(re.findall(r'^(\d+) "(.*)"$', tables.get("FileNames", ""), re.MULTILINE))
    places = re.findall(r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)", tables.get("FileLocations", ""), re.MULTILINE)
    lines = {number: f"{files[file].rpartition('/')[2]}:{line}" for number, file, line in places}
    frames = dict(re.findall(r"^(\d+) \{file_location_id=(\d+)", tables.get("StackFrames", ""), re.MULTILINE))
    found = []
    for kind, name, frame in _INSTRUCTION.findall(text):
        if ";" not in name and "/(" not in name:
            found.append(Shown(kind, _OURS.sub("/", name).rpartition("/")[0], lines[frames[frame]] if frame else ""))
    return found
