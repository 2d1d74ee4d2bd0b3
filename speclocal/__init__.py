"""speclocal: exact speculative decoding for language models on your own machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_here = Path(__file__).resolve().parent
if not (_here / "backends").is_dir():
    # A checkout: backends/ and models/ lie beside this package, and install inside it.
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from speclocal.engine import Answer, Engine, Load, Request, load

__all__ = ["Answer", "Engine", "Load", "Request", "generate", "load"]


def __getattr__(name: str) -> Any:
    if name in {"Answer", "Engine", "Load", "Request", "load"}:
        from speclocal import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'speclocal' has no attribute {name!r}")


def generate(prompt: str, *, target: str = "smollm2-135m", drafter: str | None = None, max_tokens: int = 512) -> Answer:
    """Answer one prompt; for more than one, `load` an Engine and keep it."""
    from speclocal.engine import Load, Request, load

    stream = load(Load(target=target, drafter=drafter)).stream(Request(prompt, max_tokens=max_tokens))
    for _ in stream:
        pass
    return stream.answer()
