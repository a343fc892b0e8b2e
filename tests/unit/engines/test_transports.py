"""Messages of every transport carry the same tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nrl_models.engines.transfer.transports import Transport, message_of, tensors_of


@pytest.mark.parametrize("transport", Transport)
def test_transport_round_trip(transport: Transport) -> None:
    weight = torch.randn(6, 4).to(torch.bfloat16)
    bucket = [("rows", weight[1:3]), ("columns", weight.T), ("scalar", torch.tensor(2.5, dtype=torch.float64))]
    with message_of(bucket, transport) as message:
        sent = json.loads(json.dumps(message)) if isinstance(message, dict) else message
        arrived = dict(tensors_of(sent))
    assert arrived.keys() == dict(bucket).keys()
    for name, tensor in bucket:
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


def test_temporary_file_is_deleted() -> None:
    with message_of([("weight", torch.ones(2))], Transport.FILE) as message:
        assert isinstance(message, dict)
        assert Path(message["file"]).is_file()
    assert not Path(message["file"]).exists()


def test_in_process_tensors_are_not_copied() -> None:
    weight = torch.ones(2)
    with message_of([("weight", weight)], Transport.IN_PROCESS) as message:
        ((_, arrived),) = tensors_of(message)
    assert arrived.data_ptr() == weight.data_ptr()
