"""Installs the mode in vLLM: the start-up check in the front end, the operations in the worker."""

import logging
from functools import wraps
from typing import Any

from ... import envs
from ...errors import NotCovered
from .. import coverage, devices
from ..layers import lora_experts
from ..parallel import nodes
from ..reviews import configuration, patch_points
from ..sampling import grammars, seeds, speculation
from . import (
    adapters,
    endpoint,
    items,
    kv_connectors,
    refusals,
    resumption,
    server,
    thoughts,
    unwritten_pages,
    weights,
    whole_images,
)

logger = logging.getLogger("vllm.batch_invariant")

_installed = False


@refusals.relayed
def install() -> None:
    """Hook into this process's vLLM; called by the plugin's entry point when the flag is 1. Idempotent, touches no
    device.

    Raises:
        NotCovered: a vLLM that nobody has tested, or a device that the plugin does not know.
        BadSetting: a variable with a wrong value.
    """
    global _installed
    if _installed:
        return
    from vllm.platforms import current_platform

    device_type = devices.type_of(current_platform)
    coverage.check_device(device_type)
    patch_points.check_version(device_type)
    configuration.check_variables(patch_points.ENVIRONMENT.get())
    for variable in envs.VARIABLES:
        variable.read()
        patch_points.ENVIRONMENT.get().setdefault(variable.name, variable.read)
    platform, device = type(current_platform), devices.get(current_platform.device_type)
    _check_configurations(platform)
    device.install(platform)
    adapters.install(platform, device.adapters)
    register = patch_points.REGISTER_BACKEND.get()
    register(device.vllm_backend, device.attention_backend)
    for backend in device.latent_backends():
        register(backend, device.latent_backend)
    patch_points.INIT_BATCH_INVARIANCE.put(install_worker)
    install_on_every_device()
    _installed = True


def install_on_every_device() -> None:
    """Hook into what is vLLM's own on every device: servers, requests, grammars, weights, and refusals between
    processes.
    """
    nodes.install()
    refusals.install()
    if refusals.is_users_process():
        _refuse_other_servers()
    server.offer()
    seeds.install()
    items.install()
    speculation.install_front_end()
    grammars.install()
    resumption.install()
    thoughts.install()
    whole_images.install()
    unwritten_pages.install()
    kv_connectors.install()
    weights.install(devices.of_config)


def _refuse_other_servers() -> None:
    """Refuse to start an engine whose server somebody else starts: nobody here sees whether the mode is on in it, nor
    whether it is vLLM's in Python.
    """
    arguments = patch_points.ENGINE_ARGUMENTS.get()
    create = arguments.create_engine_config

    @wraps(create)
    def create_engine_config(self: Any, usage_context: Any = None, headless: bool = False, **named: Any) -> Any:
        of_workers = getattr(self, "nnodes", 1) > 1 and getattr(self, "node_rank", 0) > 0
        if headless and not of_workers:  # of another node workers alone are started so
            raise NotCovered(
                "an engine without its server (--headless)",
                "a server that is started elsewhere need not give seeds, end answers and tell a fingerprint as the "
                "mode's does",
                "start server and engine by one vllm serve",
            )
        return create(self, usage_context, headless, **named)

    arguments.create_engine_config = create_engine_config


def _check_configurations(platform: type[Any]) -> None:
    """Run the start-up check before the platform adjusts a configuration, and the mode's own settings after it."""
    adjust = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        check(vllm_config)
        device = devices.of_config(vllm_config)
        kept = device.kept(vllm_config)
        device.before_platform(vllm_config)
        adjust(cls, vllm_config)
        for part, fields in kept.items():
            for name, value in fields.items():
                setattr(getattr(vllm_config, part), name, value)
        device.update_config(vllm_config)
        device.after_platform(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)
    _check_again(patch_points.CONFIG.get())


def _check_again(kind: type[Any]) -> None:
    """Run the start-up check once more when a configuration is complete: vLLM makes a part of it after the platform."""
    complete = kind.__post_init__

    def __post_init__(self: Any) -> None:  # noqa: N807 - vLLM's
        complete(self)
        part = self.model_config is not None and getattr(self.model_config, "is_submodel_config", False)
        if not part and devices.of_config(self).has_reviewed_config:
            check(self)

    kind.__post_init__ = __post_init__


def check(vllm_config: Any) -> None:
    """Refuse a configuration that the mode does not cover. That of a drafter decides no bits.

    Raises:
        NotCovered: a feature that is not covered, or a field that nobody has reviewed and that has not its default.
    """
    if getattr(vllm_config.model_config, "runner_type", None) == "draft":
        return
    coverage.check(vllm_config)
    if vllm_config.model_config is not None and devices.of_config(vllm_config).has_reviewed_config:
        configuration.check(vllm_config)


@refusals.relayed
def install_worker() -> None:
    """Install the operations in a worker; stands for vLLM's ``init_batch_invariance``, before the model is built.

    Raises:
        NotCovered: a GPU of a compute capability that the kernels are not compiled for.
    """
    from vllm.platforms import current_platform

    from ...aten import enable_batch_invariant_mode

    device = devices.get(current_platform.device_type)
    external_ops = device.install_worker()
    endpoint.install(devices.of_config)
    weights.install_in_worker()
    kv_connectors.install_in_worker()
    adapters.install_in_worker()
    lora_experts.install()
    enable_batch_invariant_mode(external_ops)
    device.compile_kernels()
    if untested := patch_points.untested(current_platform.device_type):
        logger.warning(untested)
    for line in device.summary(external_ops):
        logger.info(line)
