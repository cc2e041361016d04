"""TRL's side of `benchmarks/trl.py`: GRPO on the tasks of a job file, one JSON line per optimizer step.

Run by the Python of TRL's own virtual environment, with headrace's sources on its path for the rewards:
`python trl_grpo.py JOB.json STEPS.jsonl`.

Invariants
* One optimizer step is one generation of all its samples and one pass over them: strictly on-policy.
* A step's time is the wall time since the step before it ended, the first one's since training began. It
  holds generation, rewards, loss, gradients and the optimizer, and no loading.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from headrace.environments import load_environment


class Steps(TrainerCallback):
    """Scores completions and writes what each optimizer step took and earned."""

    def __init__(self, job: dict[str, Any], stream: TextIO) -> None:
        self._environment = load_environment(job["environment"], job["options"])
        self._samples = job["groups_per_step"] * job["group_size"]
        self._stream = stream
        self._started = 0.0
        self._rewards: list[float] = []
        self._tokens: list[int] = []

    def reward(
        self, completions: list[Any], completion_ids: list[list[int]], task: list[str], **_: Any
    ) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        rewards = [self._environment.reward(json.loads(t), text) for t, text in zip(task, texts, strict=True)]
        self._rewards += rewards
        self._tokens += [len(ids) for ids in completion_ids]
        return rewards

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = self._started or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        if len(self._rewards) != self._samples:
            raise RuntimeError(f"a step took {len(self._rewards)} samples instead of {self._samples}")
        step = {
            "step": state.global_step,
            "time_step_s": now - self._started,
            "reward_mean": sum(self._rewards) / self._samples,
            "completion_tokens_mean": sum(self._tokens) / self._samples,
        }
        print(json.dumps(step), file=self._stream, flush=True)
        print(
            f"TRL step {step['step']}: reward {step['reward_mean']:.3f}, {step['time_step_s']:.1f} s",
            flush=True,
        )
        self._started, self._rewards, self._tokens = now, [], []


def grpo_config(job: dict[str, Any], output_dir: str) -> GRPOConfig:
    """The job in TRL's words. Everything that only costs time on a CPU is off."""
    samples = job["groups_per_step"] * job["group_size"]
    return GRPOConfig(
        output_dir=output_dir,
        seed=job["seed"],
        max_steps=job["steps"],
        # On-policy steps: one generation of all samples per optimizer step.
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=samples // job["micro_batch"],
        generation_batch_size=samples,
        num_generations=job["group_size"],
        num_iterations=1,
        shuffle_dataset=False,
        # Plain sampling.
        temperature=job["temperature"],
        max_completion_length=job["max_tokens"],
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        # The loss.
        loss_type=job["loss_type"],
        scale_rewards=job["scale_rewards"],
        importance_sampling_level="token",
        beta=job["kl_coef"],
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        mask_truncated_completions=job["mask_truncated"],
        # The optimizer.
        optim="adamw_torch_fused",
        learning_rate=job["learning_rate"],
        lr_scheduler_type=job["schedule"],
        warmup_steps=job["warmup_steps"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        adam_epsilon=job["eps"],
        weight_decay=job["weight_decay"],
        max_grad_norm=job["max_grad_norm"],
        # The CPU's best: float32 (bfloat16 is slower here), nothing recomputed, no data workers, no logs.
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main(job_path: Path, steps_path: Path) -> None:
    job = json.loads(job_path.read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    # A task travels as JSON, so that tasks of any shape fit one column.
    dataset = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": task["prompt"]}], "task": json.dumps(task)}
            for task in job["tasks"]
        ]
    )
    with steps_path.open("w", encoding="utf-8") as stream, tempfile.TemporaryDirectory() as scratch:
        steps = Steps(job, stream)
        config = grpo_config(job, scratch)
        config.model_init_kwargs = {"dtype": job["dtype"], "attn_implementation": "sdpa"}
        trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=steps.reward,
            args=config,
            train_dataset=dataset,
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
            callbacks=[steps],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
