"""Fine-tune as a recipe says: ``oomb train`` as a script, for ``python`` and ``accelerate launch``.

python launch/finetune.py configs/demo.yaml --max_steps 2
accelerate launch --config_file configs/accelerate/zero2.yaml --num_processes 8 launch/finetune.py my_recipe.yaml
"""

import sys

from oomb_accel.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
