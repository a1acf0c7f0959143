"""The data of a run: its tokenizer, and its datasets of as many samples as it asks for."""

from nanomegatron.checkpoint.source import check_tokenizer, data_samples
from nanomegatron.config.cli import ConfigError
from nanomegatron.config.settings import Config
from nanomegatron.data.gpt_dataset import build_datasets, choose_tokenizer
from nanomegatron.data.identity import data_identity
from nanomegatron.mesh import Mesh
from nanomegatron.pick_variants import pick_dataset
from nanomegatron.report.log import RunLog
from nanomegatron.step import TrainingData


def build_data(config: Config, mesh: Mesh, log: RunLog, samples: int) -> TrainingData:
    """Build the tokenizer and the datasets, without loaders. samples: those that the run trains on.

    Raises ValueError if the data has not what the run needs. Gathers texts over world.
    """
    data = config.data
    tokenizer = choose_tokenizer(data)
    check_tokenizer(config, mesh, tokenizer)
    if tokenizer.vocab_size > (data.vocab_size or tokenizer.vocab_size):
        other = ", or data of the tokenizer that the model of --load has" if config.checkpoint.load else ""
        raise ValueError(
            f"--vocab-size {data.vocab_size}: the tokenizer has {tokenizer.vocab_size} tokens; "
            f"give at least that{other}"
        )
    held_out = config.run.eval_iters * data.global_batch_size
    asked = data_samples(config, mesh, log.warn, 0 if config.run.eval_only else samples)
    sizes = asked[-1], held_out, held_out
    datasets = build_datasets(data, sizes, config.run.seed, tokenizer, asked[:-1], pick_dataset(data))
    if config.run.eval_only and not any(datasets[1:]):
        raise ConfigError(["--eval-only: no validation and no test data; see --split and --valid-data-path"])
    identity = data_identity(datasets) if mesh.rank == 0 else {}
    return TrainingData(tokenizer, datasets, (), asked, identity)
