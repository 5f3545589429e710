import os

import torch

# Read by the Hugging Face libraries when they are imported, which no test module does before this file has run.
os.environ["HF_HUB_OFFLINE"] = "1"

torch.set_num_threads(1)
