"""A text from the trained model, for the end of a run."""

from nanomegatron.comm import any_rank
from nanomegatron.generate import generate
from nanomegatron.mesh import Mesh
from nanomegatron.run import Run


def prompts_of(run: Run) -> tuple[str, str]:
    """Two beginnings that the run's tokenizer takes: of Python, or, where it has no text, ids."""
    return ("0", "1") if run.tokenizer.spec["type"] == "NullTokenizer" else ("def", "    def test")


def show_sample(run: Run) -> None:
    """Continue two prompts and print them; every rank takes part, rank 0 prints.

    A run can do without: what fails on all ranks alike is a warning. Raises what has failed on some while
    the others wait in a collective.
    """
    if run.config.data.mock_data:
        return
    mesh, ids, texts, limit = run.mesh, [], [], run.config.model.max_position_embeddings
    with run.log.attempt("sample"):
        ids = [run.tokenizer.encode(prompt) for prompt in prompts_of(run)]
    fit = ids and all(0 < len(prompt) < limit for prompt in ids)
    if any_rank(not fit, mesh.world, mesh.device):
        return
    apart = mesh.tp.size * mesh.pp.size * mesh.etp_ep.size == 1  # each rank by itself
    with run.log.attempt("sample", alike=lambda: apart or Mesh.meet("sample")):
        length = min(120, limit - max(map(len, ids)))
        texts = generate(run.model, ids, length, temperature=0.6, top_k=40, seed=run.config.run.seed)
    with run.log.attempt("sample"):
        for text in texts:
            known = [token for token in text if token < run.tokenizer.vocab_size]  # the model may have more
            run.log.line("sample  " + run.tokenizer.decode(known).replace("\n", "\n        "))
