"""Send one request 1000 times under a load that varies the batch, and compare the answers bit for bit; see --help."""

import sys

from vllm_batch_invariant.verify.reproduce.command import main

if __name__ == "__main__":
    sys.exit(main())
