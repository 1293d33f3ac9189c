"""Libraries that use torch.distributed. Each function returns the results on one rank.

torchrun --nproc-per-node=2 -m tests.torch.programs.clients lightning flashlight FOLDER
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Result = dict[str, torch.Tensor]
_STEPS = 4


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def _data() -> TensorDataset:
    x = torch.randn(16 * _STEPS, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def _batches(rank: int) -> list[tuple[torch.Tensor, ...]]:
    return list(DataLoader(_data(), 8))[rank::2]


def _state(model: nn.Module) -> Result:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _fit(model: nn.Module, optimizer: Any, batches: Any = None) -> Result:
    for x, y in batches or _batches(dist.get_rank()):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return _state(model)


def lightning(backend: str, folder: Path) -> Result:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, strategy = Module(), DDPStrategy(process_group_backend=backend)
    options: Any = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "logger": False}
    silent = dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(strategy=strategy, default_root_dir=folder, **options, **silent)
    trainer.fit(module, DataLoader(_data(), 8))
    return {**_state(module), "loss": trainer.callback_metrics["loss"]}


def accelerate(backend: str, folder: Path) -> Result:
    from accelerate import Accelerator

    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True)
    model = _net()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(_data(), 8)
    )
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather_for_metrics(loss.detach()))
    accelerator.save_state(folder)
    return {**_state(accelerator.unwrap_model(model)), "losses": torch.stack(losses)}


def _llama(folder: Path) -> Path:
    """Save a small Llama with random parameters on rank 0, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder / "llama")
    dist.barrier()
    return folder / "llama"


def trainer(backend: str, folder: Path) -> Result:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    dist.init_process_group(backend)
    options: Any = {"use_cpu": True, "max_steps": _STEPS, "report_to": [], "save_strategy": "no"}
    arguments = TrainingArguments(str(folder), disable_tqdm=True, **options)
    tokens = torch.randint(96, (64, 12), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    model = AutoModelForCausalLM.from_pretrained(_llama(folder))
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:6])
    loss = trainer.train().training_loss
    return {**_state(model), "losses": torch.tensor([loss, trainer.evaluate()["eval_loss"]])}


def tensor_parallel(backend: str, folder: Path) -> Result:
    from transformers import AutoModelForCausalLM

    dist.init_process_group(backend)
    path, prompt = _llama(folder), torch.arange(24).view(2, 12)
    results: Result = {}
    for name, options in {"whole": {}, "parallel": {"tp_plan": "auto"}}.items():
        model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        with torch.no_grad():
            results[f"{name} logits"] = model(prompt).logits
            results[name] = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(results["whole"], results["parallel"])
    torch.testing.assert_close(results["whole logits"], results["parallel logits"])
    return results


def deepspeed(backend: str, folder: Path) -> Result:
    import deepspeed

    # Only inference uses this extension, and compiling it takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend)
    results: Result = {}
    for stage in range(4):
        model = _net()
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for x, y in _batches(dist.get_rank()):
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            results |= {f"{name} {stage}": value for name, value in _state(model).items()}
        engine.destroy()
    return results


def torchmetrics(backend: str, folder: Path) -> Result:
    from torchmetrics import MeanSquaredError, PearsonCorrCoef, SpearmanCorrCoef

    dist.init_process_group(backend)
    metrics: Any = MeanSquaredError(), PearsonCorrCoef(), SpearmanCorrCoef()
    for x, y in _batches(rank := dist.get_rank())[rank:]:  # ranks have unequal numbers of batches
        for metric in metrics:
            metric.update(x[:, 0], y[:, 0])
    return {type(metric).__name__: metric.compute() for metric in metrics}


def opacus(backend: str, folder: Path) -> Result:
    from opacus import PrivacyEngine
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP

    dist.init_process_group(backend)
    model: Any = DPDDP(_net())
    model, optimizer, batches = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(_data(), 8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(2),
    )
    return _fit(model, optimizer, batches)


def ray_train(backend: str, folder: Path) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    def train() -> None:
        model = prepare_model(_net())
        _save(_fit(model, torch.optim.SGD(model.parameters(), lr=0.1)), backend, folder)

    ray.init(num_cpus=2, include_dashboard=False)
    config, run_config = TorchConfig(backend=backend), RunConfig(storage_path=str(folder))
    options: Any = {"torch_config": config, "run_config": run_config}
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), **options).fit()
    ray.shutdown()


_FUNCTIONS = lightning, accelerate, trainer, tensor_parallel, deepspeed, torchmetrics, opacus
CLIENTS: dict[str, Callable[[str, Path], Result]] = {f.__name__: f for f in _FUNCTIONS}


def _save(result: Result, backend: str, folder: Path) -> None:
    assert dist.get_backend() == backend
    np.savez(folder / f"{dist.get_rank()}.npz", **{key: x.numpy() for key, x in result.items()})


def main(name: str, backend: str, path: str) -> None:
    """Save the result of a client on each rank. torchrun starts the ranks, except for Ray."""
    folder = Path(path)
    if name == "ray_train":
        ray_train(backend, folder)
    else:
        torch.manual_seed(3)
        _save(CLIENTS[name](backend, folder), backend, folder)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
