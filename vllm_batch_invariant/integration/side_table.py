"""What the mode keeps of objects that are vLLM's: beside each, in one attribute."""

from dataclasses import dataclass, field
from typing import Any

_ENTRY = "_batch_invariant"


@dataclass(slots=True)
class Entry:
    """What is kept of an object.

    Attributes:
        expected: of a linear layer on a GPU, what its weight is prepared for; None until it is loaded.
        activation: of one whose launch activates, the activation's class.
        b_format: of a linear layer whose weight a kernel reads as it is stored, its format; None: a matrix.
        scales: of such a layer, names of the parameters that it stores beside the weight.
        exact: of a linear layer on a GPU, its product in exact arithmetic.
        shared_experts: of a layer of routed experts, vLLM's of the shared ones; None: there are none.
        norm_adds: of a row-parallel layer without a bias, whether the norm behind it adds what the workers give.
        codes: of a norm, an activation or attention, what it writes as codes, too; None: nothing.
        heads_fit: of an attention layer, whether one operation does what its norms and rotary embedding do; None until
            that is found out.
        plan: of the places where an encoder's sequences begin, a plan of attention to them, behind what it is for.
        seen: of a mask of an encoder, which rows it shows and where items begin, behind the mask's version.
        all_reduce: of a communicator on GPUs, what adds floating-point numbers.
        is_made: of vLLM's wrapper of NCCL, whether its constructor has ended.
        resting: of a model runner, generators that it has taken out of the batch, by the row.
        candidates: of a sampler, the most logprobs that a request of the step asks for.
        sleeps: of a worker, how often memory was taken from its KV cache.
        discarded: of a worker, tensors that a sleep discards, each with a copy.
        watch: of an engine, what it knows of its weights.
        adapters: of an engine, the digest of the files that each number of an adapter stands for.
        adapter_layers: of an engine, which of its layers take adapters, and by which names.
        none_hash: of an engine with a KV connector, vLLM's parent of a first block.
        kv_key: of a KV connector, what names begin with; see ``engine.kv_connectors``.
        kv_layers: of one in a worker, the number of caches.
        kv_saves: whether it stores a layer now.
        kv_written: folders of this step, with what they will be called.
        kv_begun: of one that hands pages over, the key under which each request began.
        kv_handed: of one that hands them over, what nobody has taken.
        kv_taken: of one that reads them, requests whose pages it has been given.
        kv_beats: of one that reads them, when each request's lease was prolonged.
    """

    expected: Any = None
    activation: type | None = None
    b_format: Any = None
    scales: tuple[str, ...] = ()
    exact: Any = None
    shared_experts: Any = None
    norm_adds: bool = False
    codes: Any = None
    heads_fit: bool | None = None
    plan: tuple[Any, Any] | None = None
    seen: tuple[int, Any, Any] | None = None
    all_reduce: Any = None
    is_made: bool = False
    resting: dict[int, Any] = field(default_factory=dict)
    candidates: int = 0
    sleeps: int = 0
    discarded: list[tuple[Any, Any]] = field(default_factory=list)
    watch: Any = None
    adapters: dict[int, str] = field(default_factory=dict)
    adapter_layers: Any = None
    none_hash: bytes = b""
    kv_key: str = ""
    kv_layers: int = 0
    kv_saves: bool = False
    kv_written: dict[Any, Any] = field(default_factory=dict)
    kv_begun: dict[str, str] = field(default_factory=dict)
    kv_handed: Any = None
    kv_taken: set[str] = field(default_factory=set)
    kv_beats: dict[str, list[float]] = field(default_factory=dict)


def beside(holder: Any) -> Entry:
    """The entry of an object, which it has from when somebody first asks."""
    try:
        return holder.__dict__[_ENTRY]
    except KeyError:
        return holder.__dict__.setdefault(_ENTRY, Entry())
