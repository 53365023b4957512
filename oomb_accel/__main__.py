"""``python -m oomb_accel ...`` is ``oomb ...``."""

import sys

from oomb_accel.cli import main

if __name__ == "__main__":
    sys.exit(main())
