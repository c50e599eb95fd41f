"""While bad bytes are read a second time the ranks stay connected: who is lost then is missed at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper.coordination.rank_group import RankGroup, SoloRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import TornCheckpointError
from stepkeeper.log.foreign_steps import ForeignRecord
from stepkeeper.restore import Restorer, second_read
from stepkeeper.restore import restorer as restorer_module
from stepkeeper.restore.peers.exchange import Exchange, exchange_among
from stepkeeper.storage import open_store


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_the_ranks_are_connected_until_all_know_what_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": torch.ones(300)}, checkpoint_id=tmp_path / "1", no_dist=True)
    data = tmp_path / "1" / "__0_0.distcp"
    written = bytearray(data.read_bytes())
    written[written.index(torch.ones(300).numpy().tobytes())] ^= 1
    data.write_bytes(written)
    connected = False
    asked: list[bool] = []

    @contextmanager
    def watched(rank_group: RankGroup, name: str, waits: Waits) -> Iterator[Exchange]:
        nonlocal connected
        with exchange_among(rank_group, name, waits) as exchange:
            connected = True
            yield exchange
        connected = False

    def noting(*arguments: Any, **named: Any) -> str:
        asked.append(connected)
        return second_read.confirm_bad(*arguments, **named)

    monkeypatch.setattr(restorer_module, "exchange_among", watched)
    monkeypatch.setattr(restorer_module, "confirm_bad", noting)
    restorer = Restorer(open_store(tmp_path.as_uri()), SoloRankGroup())
    with pytest.raises(TornCheckpointError, match="another checksum"):
        restorer.restore(ForeignRecord(slot=0, step=1, folder="1"), {"w": torch.zeros(300)})
    assert asked == [True]
