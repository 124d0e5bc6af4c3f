//! `plan breakeven`: from which prompt length and over which link disaggregation can pay.

use clap::Args;
use workload::plan::breakeven::{Answer, Costs, PROMPT_TOKENS_MAX, cell, lengths, slowest_link};
use workload::plan::kv::{LINKS, rate_of_gbit};

use super::model::{ModelNumbers, named, numbers};
use super::sheet::{Item, Sheet, Unit};
use super::times::{Measured, TimesArgs};

const EXAMPLES: &str = "\
Examples:
  baton plan breakeven --model smollm2-135m --prefill-us-per-token 500 --step-ms 6 --itl-ms-max 50
  baton plan breakeven --kv-bytes-per-token 131072 --prefill-us-per-token 60 --step-ms 12 --itl-ms-max 50 --chunk-tokens 2048
  baton plan breakeven --kv-bytes-per-token 131072 --prefill-us-per-token 60 --step-ms 12 --itl-ms-max 50 --no-chunks
  baton plan breakeven --costs costs.json --itl-ms-max 50";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub(super) struct BreakevenArgs {
    /// Take the KV of a token (16-bit values) from these files: a path or a name.
    #[arg(long, value_name = "MODEL", conflicts_with = "kv_bytes_per_token")]
    model: Option<String>,
    /// KV bytes of a token (`baton plan kv`).
    #[arg(long, value_name = "BYTES", required_unless_present_any = ["model", "costs"])]
    kv_bytes_per_token: Option<f64>,
    #[command(flatten)]
    times: TimesArgs,
    /// Measured time of a step of the running streams alone: their usual gap.
    #[arg(long, value_name = "MS", required_unless_present = "costs")]
    step_ms: Option<f64>,
    /// The longest gap between tokens that is allowed.
    #[arg(long, value_name = "MS", default_value_t = 50.0)]
    itl_ms_max: f64,
    /// Streams that run beside the prompt.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    streams: u32,
    /// Prompt tokens in one step of a co-located node beside streams. A node on the CPU has 128 (`--mixed-step-tokens`).
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    chunk_tokens: u32,
    /// Co-located nodes compute whole prompts in one step.
    #[arg(long, conflicts_with = "chunk_tokens")]
    no_chunks: bool,
    /// Prompt tokens in one step of a prefill node.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    prefill_chunk_tokens: u32,
    /// Prompt tokens in the last chunk of a long prompt (`--last-chunk-tokens` of a prefill node).
    #[arg(long, value_name = "TOKENS", default_value_t = 32)]
    last_chunk_tokens: u32,
    /// Time of a handoff beside its bytes. The default is the upper quartile of the transfer tail in
    /// docs/measurements/latency.md, rounded.
    #[arg(long, value_name = "MS", default_value_t = 3.0)]
    handoff_ms: f64,
    /// Prompt lengths of the table.
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_values_t = [128, 512, 2048, 8192, 32768])]
    prompt_tokens: Vec<u32>,
    /// A link of your own, in 10^9 bits a second.
    #[arg(long, value_name = "GBIT/S")]
    link_gbit: Option<f64>,
}

impl BreakevenArgs {
    pub fn sheet(&self) -> anyhow::Result<Sheet> {
        let model = self.model.as_deref().map(numbers).transpose()?;
        let of_model = model.as_ref().map(ModelNumbers::kv_bytes_per_token).transpose()?;
        let measured = self.times.measured()?;
        let of_file = |figure: fn(&Measured) -> f64| measured.as_ref().map(figure);
        let kv_of_file = of_file(|measured| measured.kv_bytes_per_token);
        let step_ms = self.step_ms.or(of_file(|measured| measured.step_ms));
        let costs = Costs {
            prefill_s: self.times.prefill_us_per_token(measured.as_ref()) / 1e6,
            step_s: step_ms.unwrap_or(f64::NAN) / 1e3,
            chunk_tokens: (!self.no_chunks).then_some(self.chunk_tokens),
            prefill_chunk_tokens: self.prefill_chunk_tokens,
            last_chunk_tokens: self.last_chunk_tokens,
            kv_bytes_per_token: of_model.or(self.kv_bytes_per_token).or(kv_of_file).unwrap_or(f64::NAN),
            handoff_s: self.handoff_ms / 1e3,
            gap_limit_s: self.itl_ms_max / 1e3,
        };
        let own = self.link_gbit.map(rate_of_gbit).transpose()?;
        let links = LINKS.iter().map(|link| (link.name, link.rate));
        let links: Vec<(&str, f64)> = links.chain(own.map(|rate| ("your link", rate))).collect();
        let sheet = named(Sheet::new("breakeven"), model.as_ref());
        let sheet = self.times.named(sheet, measured.as_ref());
        let sheet = self.explained(self.with_inputs(sheet, costs));
        let sheet = sheet.table("prompt_lengths_that_can_pay", &LINK_COLUMNS, link_rows(costs, &links)?);
        let sheet = sheet.table("prompts", &PROMPT_COLUMNS, self.prompt_rows(costs)?);
        Ok(sheet.table("prompt_by_link", &CELL_COLUMNS, self.cell_rows(costs, &links)?))
    }

    fn with_inputs(&self, sheet: Sheet, costs: Costs) -> Sheet {
        let tokens = Unit::Whole("tokens");
        let sheet = sheet
            .input(
                ("kv_bytes_per_token", "KV of a token"),
                costs.kv_bytes_per_token,
                Unit::Whole("B"),
            )
            .input(
                ("prefill_us_per_token", "one prompt token"),
                costs.prefill_s * 1e6,
                Unit::Of("us"),
            )
            .input(("step_ms", "step of the running streams"), costs.step_s * 1e3, Unit::Ms)
            .input(("itl_ms_max", "longest gap allowed"), self.itl_ms_max, Unit::Ms)
            .input(("streams", "running streams"), f64::from(self.streams), Unit::Whole(""));
        let sheet = match costs.chunk_tokens {
            Some(chunk) => sheet.input(("chunk_tokens", "chunk of a co-located node"), f64::from(chunk), tokens),
            None => sheet.input_words(("chunk_tokens", "chunk of a co-located node"), "whole prompts"),
        };
        sheet
            .input(
                ("prefill_chunk_tokens", "chunk of a prefill node"),
                f64::from(self.prefill_chunk_tokens),
                tokens,
            )
            .input(
                ("last_chunk_tokens", "its last chunk"),
                f64::from(self.last_chunk_tokens),
                tokens,
            )
            .input(("handoff_ms", "handoff beside its bytes"), self.handoff_ms, Unit::Ms)
    }

    fn explained(&self, sheet: Sheet) -> Sheet {
        sheet
            .formula("co-located: the worst gap of a running stream grows by the time of one chunk of the prompt")
            .formula("two pools: running streams feel nothing; the new stream waits once for the KV that is still under way when")
            .formula("its prompt ends: the last chunk's way, or the queue on a link that is slower than the computing, and the handoff")
            .formula("can pay = the co-located gap breaks the limit, and that wait is shorter than the growth of the gap")
            .note("- under \"from\": for no length; - under \"to\": for all longer prompts (up to 131,072 tokens).")
            .note("Left out: nodes of an idle pool are a cost, transfers of several prompts share a link, and attention makes later")
            .note("tokens of a long prompt dearer. So \"can pay\" is necessary and not sufficient. `baton compare` measures.")
    }

    fn prompt_rows(&self, costs: Costs) -> anyhow::Result<Vec<Vec<Item>>> {
        let mut rows = Vec::with_capacity(self.prompt_tokens.len());
        for tokens in &self.prompt_tokens {
            // The stall does not depend on the link.
            let any = cell(costs, *tokens, LINKS[0].rate)?;
            let lost = f64::from(*tokens) * costs.prefill_s * f64::from(self.streams);
            let slowest = slowest_link(costs, *tokens)?;
            rows.push(vec![
                Item::Number(f64::from(*tokens), Unit::Whole("tokens")),
                Item::Number(any.stall_s * 1e3, Unit::Ms),
                Item::Number((costs.step_s + any.stall_s) * 1e3, Unit::Ms),
                Item::Number(lost * 1e3, Unit::Ms),
                slowest.map_or(Item::Nothing, |rate| Item::Number(rate * 8.0 / 1e9, Unit::Of("Gb/s"))),
            ]);
        }
        Ok(rows)
    }

    fn cell_rows(&self, costs: Costs, links: &[(&str, f64)]) -> anyhow::Result<Vec<Vec<Item>>> {
        let mut rows = Vec::with_capacity(self.prompt_tokens.len() * links.len());
        for tokens in &self.prompt_tokens {
            for (name, rate) in links {
                let cell = cell(costs, *tokens, *rate)?;
                rows.push(vec![
                    Item::Number(f64::from(*tokens), Unit::Whole("tokens")),
                    Item::Words((*name).to_owned()),
                    Item::Number(cell.stall_s * 1e3, Unit::Ms),
                    Item::Number(cell.transfer_s * 1e3, Unit::Ms),
                    Item::Words(words(cell.answer).to_owned()),
                ]);
            }
        }
        Ok(rows)
    }
}

const LINK_COLUMNS: [(&str, &str); 4] = [
    ("link", "link"),
    ("bytes_per_s", ">line rate"),
    ("from_tokens", ">from"),
    ("to_tokens", ">to"),
];
const PROMPT_COLUMNS: [(&str, &str); 5] = [
    ("prompt_tokens", ">prompt"),
    ("stall_ms", ">gap grows by"),
    ("worst_gap_ms", ">worst gap"),
    ("all_streams_wait_ms", ">all streams wait"),
    ("slowest_link_gbit", ">slowest link that can pay"),
];
const CELL_COLUMNS: [(&str, &str); 5] = [
    ("prompt_tokens", ">prompt"),
    ("link", "link"),
    ("stall_ms", ">co-located gap grows by"),
    ("transfer_felt_ms", ">transfer felt"),
    ("answer", "answer"),
];

fn words(answer: Answer) -> &'static str {
    match answer {
        Answer::LimitIsKept => "no need: co-located keeps the limit",
        Answer::LinkTooSlow => "no: the link is too slow",
        Answer::CanPay => "can pay",
    }
}

fn link_rows(costs: Costs, links: &[(&str, f64)]) -> anyhow::Result<Vec<Vec<Item>>> {
    let mut rows = Vec::with_capacity(links.len());
    for (name, rate) in links {
        let range = lengths(costs, *rate)?;
        let from = range.map_or(Item::Nothing, |(from, _)| {
            Item::Number(f64::from(from), Unit::Whole("tokens"))
        });
        let to = match range {
            Some((_, to)) if to < PROMPT_TOKENS_MAX => Item::Number(f64::from(to), Unit::Whole("tokens")),
            _ => Item::Nothing,
        };
        rows.push(vec![
            Item::Words((*name).to_owned()),
            Item::Number(*rate, Unit::ByteRate),
            from,
            to,
        ]);
    }
    Ok(rows)
}
