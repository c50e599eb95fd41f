"""`python -m demo_tpu`."""

import sys

from demo_tpu.run import main

if __name__ == "__main__":
    sys.exit(main())
