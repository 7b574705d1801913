"""How a calibration loads its models and reports: devices, dtypes, quantization, offloading, trackers."""

from __future__ import annotations

from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.tracking import GeneralTracker
from calibration_jobs import job_arguments, make_job, relative_error, weights_of, write_pair
from transformers import AutoModelForCausalLM

from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.calibration.loading import load_model
from kvbridge_hf.calibration.run import run_calibration
from kvbridge_hf.calibration.sequences import SequenceStore, StoredBatches
from kvbridge_hf.cli import main
from kvbridge_hf.errors import CalibrationError
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper

SENSITIVE = {"weighting": "sensitivity", "support": "head_local"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def run(job):
    return run_calibration(job, progress=False, say=lambda text: None)


def fit_of(job, *models) -> dict[str, torch.Tensor]:
    """Weights of a fit in memory over the sequences of a finished run."""
    batches = StoredBatches(SequenceStore(job.state_folder / "data"), job.batch_size)
    return {name: weight.detach() for name, weight in fit_mapper(*models, batches, job.fit).named_parameters()}


@pytest.mark.parametrize("plan", ["a", "c"])
def test_a_device_map_changes_nothing(pair, tmp_path, monkeypatch, plan):
    """Here with so little room that a part of each model stays on the disk."""
    maps = []
    load = AutoModelForCausalLM.from_pretrained

    def crowded(name, **arguments):
        assert arguments["device_map"] == "auto"
        size = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
        model = load(name, max_memory={"cpu": int(0.7 * size)}, offload_folder=str(tmp_path / "disk"), **arguments)
        maps.append(set(map(str, model.hf_device_map.values())))
        return model

    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", crowded)
        run(make_job(pair, tmp_path / "mapped", device_map="auto", plan=plan, **SENSITIVE))
    assert maps == [{"cpu", "disk"}] * 2
    run(make_job(pair, tmp_path / "plain", plan=plan, **SENSITIVE))
    assert relative_error(weights_of(tmp_path / "mapped"), weights_of(tmp_path / "plain")) < 1e-6


def test_offloaded_models_are_calibrated_like_loaded_ones(pair, tmp_path):
    """As `device_map="auto"` leaves them where the devices are too small: weights away until a layer runs."""
    job = make_job(pair, tmp_path / "out", **SENSITIVE)
    run(job)
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (job.source, job.target)]
    accelerate.cpu_offload(models[0], execution_device=torch.device("cpu"))
    accelerate.disk_offload(models[1], str(tmp_path / "disk"), execution_device=torch.device("cpu"))
    assert models[1].get_input_embeddings().weight.is_meta
    assert relative_error(fit_of(job, *models), weights_of(job.output)) < 1e-6


def test_models_in_bfloat16_are_loaded_so_and_their_moments_are_not(pair, tmp_path):
    job = make_job(pair, tmp_path / "out", dtype="bfloat16", **SENSITIVE)
    run(job)
    models = [load_model(job, role, torch.device("cpu")) for role in ("source", "target")]
    assert all(model.dtype == torch.bfloat16 for model in models)
    assert relative_error(fit_of(job, *models), weights_of(job.output)) < 1e-6
    mapper = KVBridgeMapper.from_pretrained(job.output)
    assert mapper.key_weight.dtype == torch.float32


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_quantized_models_are_calibrated(pair, tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    job = make_job(pair, tmp_path / "out", quantization=bits)
    run(job)
    config = KVBridgeMapper.from_pretrained(job.output).config
    assert config.source_fingerprint["kv_projections"] is None
    models = [load_model(job, role, torch.device("cpu")) for role in ("source", "target")]
    assert all(model.is_quantized for model in models)
    assert relative_error(fit_of(job, *models), weights_of(job.output)) < 1e-4


def test_quantization_without_its_library_is_answered_in_one_line(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available", lambda: False)
    arguments = job_arguments(make_job(pair, tmp_path / "out"), "--quantization", "4bit")
    assert main(["fit", *arguments]) == 2
    error = capsys.readouterr().err
    assert "bitsandbytes" in error and "cannot be loaded" in error


class Notebook(GeneralTracker):
    """A tracker that keeps what it is told."""

    name = "notebook"
    requires_logging_directory = False
    told: list = []

    def __init__(self, run_name, **kwargs):
        super().__init__()
        self.told.append(("start", run_name))

    @property
    def tracker(self):
        return self.told

    def store_init_configuration(self, values):
        self.told.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.told.append(("log", values))

    def finish(self):
        self.told.append(("finish", None))


def test_a_tracker_is_told_of_speed_and_scores(pair, tmp_path, monkeypatch):
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    monkeypatch.setattr(Notebook, "told", [])
    summary = run(make_job(pair, tmp_path / "out", report_to="notebook", weighting="sensitivity"))
    kinds = [kind for kind, _ in Notebook.told]
    assert kinds[:2] == ["start", "config"] and kinds[-1] == "finish"
    values = {name: value for kind, entry in Notebook.told if kind == "log" for name, value in entry.items()}
    assert values["statistics/tokens_per_second"] > 0
    scores = summary["heldout_r2"]["keys"]
    assert values["heldout_r2/keys"] == pytest.approx(sum(scores) / len(scores))


def test_a_tracker_that_is_unknown_or_not_installed_is_refused(pair, tmp_path, monkeypatch):
    with pytest.raises(CalibrationError, match="--report-to paper: .*Unsupported logging capability"):
        run(make_job(pair, tmp_path / "out", report_to="paper"))
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    with pytest.raises(CalibrationError, match="pip install trackio"):
        run(make_job(pair, tmp_path / "out", report_to="trackio"))


def test_several_processes_with_a_device_map_are_refused(pair, tmp_path, monkeypatch):
    from kvbridge_hf.calibration.job_plan import check_divisible

    class Two:
        count = 2

    job = make_job(pair, tmp_path / "out", device_map="auto")
    with pytest.raises(CalibrationError, match="2 processes. Start one process"):
        check_divisible(job, job.fit, Two())
