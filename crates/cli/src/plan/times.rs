//! Measured times of tokens: typed in, or from a file of costs that `baton bench engine` wrote.

use std::path::PathBuf;

use clap::Args;
use simulator::costs::{Costs, StepShape};

use super::sheet::Sheet;
use crate::exit::{Exit, WithExit as _};

#[derive(Debug, Args)]
pub(super) struct TimesArgs {
    /// Take the times from this file, which `baton bench engine` wrote. A time that is typed in as well replaces the file's.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    costs: Option<PathBuf>,
    /// Measured time of a node for one prompt token.
    #[arg(long, value_name = "US", required_unless_present = "costs")]
    prefill_us_per_token: Option<f64>,
    /// With `--costs`: sequences in a decode step.
    #[arg(long, value_name = "N", default_value_t = 16, requires = "costs", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    batch: u32,
    /// With `--costs`: tokens of each of these sequences.
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, requires = "costs", value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    context_tokens: u32,
    /// With `--costs`: prompt tokens of a prefill step.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, requires = "costs", value_parser = clap::value_parser!(u32).range(2..=1_048_576))]
    step_tokens: u32,
}

/// What plans need of a file of costs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Measured {
    pub name: String,
    pub prefill_us_per_token: f64,
    /// A step of the batch, without a prompt.
    pub step_ms: f64,
    /// That step by its sequences.
    pub decode_us_per_token: f64,
    pub kv_bytes_per_token: f64,
}

impl TimesArgs {
    /// `None` without `--costs`.
    ///
    /// # Errors
    /// The file cannot be read, or is no file of costs.
    pub fn measured(&self) -> anyhow::Result<Option<Measured>> {
        let costs = self
            .costs
            .as_deref()
            .map(crate::simulate::costs)
            .transpose()
            .exit(Exit::Usage)?;
        Ok(costs.map(|costs| self.of(&costs)))
    }

    fn of(&self, costs: &Costs) -> Measured {
        let mut prompt = StepShape::default();
        prompt.add(self.step_tokens, 0, 0);
        let mut decode = StepShape::default();
        for _ in 0..self.batch {
            decode.add(1, self.context_tokens - 1, 1);
        }
        let step_s = costs.step.seconds(&decode);
        Measured {
            name: costs.name.clone(),
            prefill_us_per_token: costs.step.seconds(&prompt) * 1e6 / f64::from(self.step_tokens),
            step_ms: step_s * 1e3,
            decode_us_per_token: step_s * 1e6 / f64::from(self.batch),
            kv_bytes_per_token: costs.kv_bytes_per_token as f64,
        }
    }

    /// What was typed in goes before the file. NaN, which every formula refuses, stands for nothing; clap requires one of the two.
    pub fn prefill_us_per_token(&self, measured: Option<&Measured>) -> f64 {
        let of_file = measured.map(|measured| measured.prefill_us_per_token);
        self.prefill_us_per_token.or(of_file).unwrap_or(f64::NAN)
    }

    /// Says where the times come from.
    pub fn named(&self, sheet: Sheet, measured: Option<&Measured>) -> Sheet {
        match measured {
            Some(measured) => sheet.input_words(
                ("costs", "costs"),
                format!(
                    "{}: prompts in steps of {}, {} sequences of {} tokens",
                    measured.name, self.step_tokens, self.batch, self.context_tokens
                ),
            ),
            None => sheet,
        }
    }
}
