"""A bit that flips in the memory of a running process, as one does in a machine that computes wrongly."""

from pathlib import Path


def flip(process: int, held: bytes) -> int:
    """Flip a bit of the first number of these bytes, wherever a process may write them; returns how often."""
    flips = 0
    with open(f"/proc/{process}/mem", "r+b", buffering=0) as memory:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            begin, end = (int(each, 16) for each in span.split("-"))
            if not rights.startswith("rw") or end - begin < len(held) or "/" in line:
                continue
            memory.seek(begin)
            try:
                content = memory.read(end - begin)
            except OSError:
                continue
            at = content.find(held)
            while at >= 0:
                memory.seek(begin + at + 1)  # the upper byte of a bf16: the lowest bit but one of the exponent
                memory.write(bytes([held[1] ^ 1]))
                flips += 1
                at = content.find(held, at + 1)
    return flips
