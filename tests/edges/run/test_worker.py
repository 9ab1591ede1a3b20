import pytest
import torch

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.edges.run.worker import Worker, work
from ssl_sec.errors import ConfigError


@pytest.mark.parametrize(("device", "is_tried"), [("cuda", True), ("cpu", False)])
def test_cudnn_tries_its_algorithms_where_there_is_a_gpu(device, is_tried, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with pytest.raises(ConfigError):  # before anything is computed
        work("pretrain", {"nosuch": 1}, RunFolder(tmp_path), Worker(rank=0, world_size=1, device=torch.device(device)))
    assert torch.backends.cudnn.benchmark == is_tried
