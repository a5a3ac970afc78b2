"""What a user puts into an algorithm during a run: layers, parameters, whole networks."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook


class NewParts:
    """Notices modules and parameters that are assigned to a module or to one of its parts, until `end`.

    Args:
        module: the algorithm.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.begin()
        kinds = register_module_module_registration_hook, register_module_parameter_registration_hook
        self.handles = [register(self.notice) for register in kinds]

    def begin(self) -> None:
        """Begin to look for parts that are not there yet."""
        self.found = False
        self.known = {id(part) for part in self.module.modules()}

    def notice(self, module: nn.Module, name: str, part: nn.Module | nn.Parameter | None) -> None:
        """Note that a part was assigned, if it was assigned to the algorithm; torch calls this for all modules of the process."""
        if id(module) in self.known:
            self.found = True

    def end(self) -> None:
        """Look no longer."""
        for handle in self.handles:
            handle.remove()
