import os
from collections.abc import Iterator

import pytest
import torch

# Read by the Hugging Face libraries when they are imported, which no test module does before this file has run.
os.environ["HF_HUB_OFFLINE"] = "1"

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def remote_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers copies code that it imports: one place for all tests of a process.

    Python keeps the package of these copies, so that a second place would not be looked at.
    """
    with pytest.MonkeyPatch.context() as patch:
        place = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", place)
        yield
