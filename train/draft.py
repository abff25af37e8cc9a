"""Train the recipe's draft model, whatever `head.type` says: train/eagle3.py under a general name.

accelerate launch train/draft.py [RECIPE] [head.type=dflash head.mask_token_id=N] [section.key=value ...]
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("eagle3.py")), run_name="__main__")
