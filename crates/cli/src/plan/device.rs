//! `plan prefill` and `plan decode`: what a device can do at most, from its data sheet.

use anyhow::Context;
use clap::Args;
use workload::plan::decode::{DecodeStep, bound};
use workload::plan::prefill::{Attention, Device, Prompt, SPARSE_BY_DENSE, memory_fit, operations, time, with_extra};

use super::model::{ModelNumbers, named, numbers};
use super::sheet::{Sheet, Unit};
use crate::exit::{Exit, WithExit as _};

const TFLOPS: Unit = Unit::Of("TFLOPS");
const TFLOP: Unit = Unit::Of("TFLOP");
/// The data sheet of NVIDIA's H100 SXM and H200 gives this for FP8, "with sparsity".
const KNOWN_SPARSE_TFLOPS: f64 = 3958.0;

const PREFILL_EXAMPLES: &str = "\
Examples:
  baton plan prefill --params-billion 70 --prompt-tokens 512 --peak-dense-tflops 1979
  baton plan prefill --params-billion 70 --prompt-tokens 512 --peak-sparse-tflops 3958 --extra-percent 10 --memory-gb 80
  baton plan prefill --model smollm2-135m --prompt-tokens 4096 --peak-dense-tflops 0.4";

#[derive(Debug, Args)]
#[command(before_help = PREFILL_EXAMPLES, allow_negative_numbers = true)]
pub(super) struct PrefillArgs {
    /// Parameters, in 10^9.
    #[arg(long, value_name = "N", required_unless_present = "model")]
    params_billion: Option<f64>,
    /// Take the parameters and the shape of attention from these files: a path or a name.
    #[arg(long, value_name = "MODEL", conflicts_with = "params_billion")]
    model: Option<String>,
    /// Tokens of the prompt. Size on the 99th percentile of your prompts, not on the mean.
    #[arg(long, value_name = "TOKENS")]
    prompt_tokens: f64,
    /// Peak of one device for dense matrices, in the format of the weights.
    #[arg(long, value_name = "TFLOPS", required_unless_present = "peak_sparse_tflops")]
    peak_dense_tflops: Option<f64>,
    /// A peak that the data sheet gives "with sparsity". Half of it is taken.
    #[arg(long, value_name = "TFLOPS", conflicts_with = "peak_dense_tflops")]
    peak_sparse_tflops: Option<f64>,
    /// Share of the peak that the model reaches.
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    mfu: f64,
    /// Layers; with `--attention-width` the cost of attention is added.
    #[arg(long, value_name = "N", requires = "attention_width", conflicts_with = "model")]
    layers: Option<f64>,
    /// Query heads times head size.
    #[arg(long, value_name = "N", requires = "layers", conflicts_with = "model")]
    attention_width: Option<f64>,
    /// Added to the time: what is not arithmetic.
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0)]
    extra_percent: f64,
    /// Bytes of one weight.
    #[arg(long, value_name = "BYTES", default_value_t = 1.0)]
    weight_bytes: f64,
    /// Memory of one device, in 10^9 bytes: whether the weights fit.
    #[arg(long, value_name = "GB")]
    memory_gb: Option<f64>,
    /// Devices that share the weights and the work.
    #[arg(long, value_name = "N", default_value_t = 1)]
    devices: u32,
}

impl PrefillArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let model = self.model.as_deref().map(numbers).transpose()?;
        let prompt = self.prompt(model.as_ref());
        let devices = f64::from(self.devices);
        let (dense, was_sparse) = match (self.peak_dense_tflops, self.peak_sparse_tflops) {
            (Some(dense), _) => (dense, false),
            (None, sparse) => (sparse.unwrap_or(f64::NAN) / SPARSE_BY_DENSE, true),
        };
        let found = operations(prompt)?;
        let device = Device {
            dense_tflops: dense * devices,
            mfu: self.mfu,
        };
        let took = time(found, device)?;
        let extra = with_extra(self.extra_percent)?;
        let sheet = named(Sheet::new("prefill"), model.as_ref())
            .input(("parameters_billion", "parameters"), prompt.parameters / 1e9, Unit::Of("billion"))
            .input(("prompt_tokens", "prompt"), prompt.tokens, Unit::Whole("tokens"))
            .input(("peak_dense_tflops", "dense peak of one device"), dense, TFLOPS)
            .input(("devices", "devices"), devices, Unit::Whole(""))
            .input(("mfu", "share of the peak"), self.mfu, Unit::Percent)
            .input(("extra_percent", "added to the time"), self.extra_percent, Unit::Of("%"))
            .formula("operations = 2 x parameters x prompt tokens, and 2 x layers x attention width x tokens^2 for attention")
            .formula("time = operations / (dense peak x devices x share of the peak), and what is added")
            .result(("linear_tflop", "operations with weights"), found.linear_tflop, TFLOP)
            .result(("attention_tflop", "operations of attention"), found.attention_tflop, TFLOP)
            .result(("prefill_ms", "time at the dense peak"), took.dense_s * extra * 1e3, Unit::Ms)
            .result(
                ("prefill_at_sparse_peak_ms", "time that a sparse peak promises"),
                took.at_sparse_peak_s * extra * 1e3,
                Unit::Ms,
            );
        self.memory(warned(sheet, dense, was_sparse), prompt.parameters)
    }

    fn prompt(&self, model: Option<&ModelNumbers>) -> Prompt {
        let typed = self.layers.zip(self.attention_width);
        let shape = model.map(|model| (model.layers, model.attention_width)).or(typed);
        Prompt {
            parameters: model.map_or(self.params_billion.unwrap_or(f64::NAN) * 1e9, |model| model.parameters),
            tokens: self.prompt_tokens,
            attention: shape.map(|(layers, width)| Attention { layers, width }),
        }
    }

    fn memory(&self, sheet: Sheet, parameters: f64) -> anyhow::Result<Sheet> {
        let Some(memory_gb) = self.memory_gb else {
            return Ok(sheet);
        };
        let weights = parameters * self.weight_bytes / 1e9;
        let fit = memory_fit(weights, memory_gb * f64::from(self.devices))?;
        Ok(sheet
            .input(("weight_bytes", "bytes of a weight"), self.weight_bytes, Unit::Of("B"))
            .input(("memory_gb", "memory of one device"), memory_gb, Unit::Of("GB"))
            .result(("weights_gb", "weights"), fit.weights_gb, Unit::Of("GB"))
            .result(
                ("memory_all_gb", "memory of all devices"),
                fit.memory_gb,
                Unit::Of("GB"),
            )
            .result(
                ("free_gb", "left for KV and everything else"),
                fit.free_gb,
                Unit::Of("GB"),
            ))
    }
}

fn warned(sheet: Sheet, dense: f64, was_sparse: bool) -> Sheet {
    if was_sparse {
        sheet.warning(
            "A peak \"with sparsity\" holds for weights of which half are zero by design. Yours are dense: the time at the dense peak counts.",
        )
    } else if dense == KNOWN_SPARSE_TFLOPS {
        sheet.warning(
            "3,958 TFLOPS is what the data sheets of H100 and H200 give for FP8 with sparsity. The dense peak is 1,979: the time is twice as long.",
        )
    } else {
        sheet.note("Check that the peak is the dense one: many data sheets give twice as much, \"with sparsity\".")
    }
}

const DECODE_EXAMPLES: &str = "\
Examples:
  baton plan decode --params-billion 8 --weight-bytes 2 --bandwidth-gb-s 600
  baton plan decode --params-billion 8 --bandwidth-gb-s 3350 --batch 64 --context-tokens 2048 --kv-bytes-per-token 131072";

#[derive(Debug, Args)]
#[command(before_help = DECODE_EXAMPLES, allow_negative_numbers = true)]
pub(super) struct DecodeArgs {
    /// Parameters, in 10^9.
    #[arg(long, value_name = "N", required_unless_present = "model")]
    params_billion: Option<f64>,
    /// Take the parameters and the KV of a token (16-bit values) from these files: a path or a name.
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["params_billion", "kv_bytes_per_token"])]
    model: Option<String>,
    /// Bytes of one weight.
    #[arg(long, value_name = "BYTES", default_value_t = 2.0)]
    weight_bytes: f64,
    /// Memory bandwidth, in 10^9 bytes a second.
    #[arg(long, value_name = "GB/S")]
    bandwidth_gb_s: f64,
    /// Sequences in a step.
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    batch: f64,
    /// Tokens of a sequence whose KV each step reads.
    #[arg(long, value_name = "TOKENS", default_value_t = 0.0)]
    context_tokens: f64,
    /// KV bytes of a token (`baton plan kv`).
    #[arg(long, value_name = "BYTES")]
    kv_bytes_per_token: Option<f64>,
}

impl DecodeArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let model = self.model.as_deref().map(numbers).transpose()?;
        let of_model = model.as_ref().map(ModelNumbers::kv_bytes_per_token).transpose()?;
        let kv = of_model.or(self.kv_bytes_per_token).unwrap_or(0.0);
        if self.context_tokens != 0.0 && kv == 0.0 {
            let error = anyhow::anyhow!(
                "--context-tokens needs --kv-bytes-per-token or --model, which say how many bytes a token is"
            );
            return Err(error).exit(Exit::Usage);
        }
        let parameters = model
            .as_ref()
            .map(|model| model.parameters / 1e9)
            .or(self.params_billion);
        let parameters = parameters.context("--params-billion or --model is missing")?;
        let found = bound(DecodeStep {
            weights_bytes: parameters * 1e9 * self.weight_bytes,
            bandwidth: self.bandwidth_gb_s * 1e9,
            batch: self.batch,
            kv_bytes_each: self.context_tokens * kv,
        })?;
        Ok(named(Sheet::new("decode"), model.as_ref())
            .input(("parameters_billion", "parameters"), parameters, Unit::Of("billion"))
            .input(("weight_bytes", "bytes of a weight"), self.weight_bytes, Unit::Of("B"))
            .input(
                ("bandwidth_gb_per_s", "memory bandwidth"),
                self.bandwidth_gb_s,
                Unit::Of("GB/s"),
            )
            .input(("batch", "sequences in a step"), self.batch, Unit::Of(""))
            .input(
                ("kv_bytes_each", "KV of one sequence"),
                self.context_tokens * kv,
                Unit::Bytes,
            )
            .formula("a step reads every weight once and the KV of its sequences: time = bytes / bandwidth")
            .formula("tokens a second of one sequence = 1 / time of a step")
            .result(("step_ms", "shortest step"), found.step_s * 1e3, Unit::Ms)
            .result(
                ("tokens_per_s_each", "one sequence"),
                found.tokens_each,
                Unit::Of("tokens/s"),
            )
            .result(
                ("tokens_per_s_all", "all sequences"),
                found.tokens_all,
                Unit::Of("tokens/s"),
            )
            .note("This is a bound. A measured rate far below it means that memory bandwidth is not what limits it."))
    }
}
