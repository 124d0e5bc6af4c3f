//! `baton bench engine --limits`: the engine's speed beside what the machine could do at most.

use std::io::Write as _;
use std::time::Instant;

use anyhow::{Context, ensure};
use engine::EngineKind;
use engine::machine::{Machine, Range};
use model_files::model::Model;
use serde::Serialize;
use workload::statistics::Samples;

use super::limits::{ModelCosts, Peaks};
use super::rig::{Rig, Timed};
use super::sweep::{CHUNK_MAX, median};
use super::{EngineArgs, Opening, report, write};
use crate::bench::load::environment::resident_bytes;
use crate::exit::Exit;
use crate::observe::table::Table;
use crate::terminal::{Terminal, say};

/// Chunks of a prompt, as a node has them by default.
const CHUNK_TOKENS: u32 = 512;
const PROMPTS: [u32; 4] = [128, 512, 2_048, 8_000];
/// Positions before the first measured step of one stream. The first token is a prompt.
const DEPTHS: [u32; 4] = [1, 512, 2_000, 8_000];
const STREAMS: [u32; 5] = [2, 4, 8, 16, 32];
const STREAM_DEPTHS: [u32; 2] = [128, 512];
/// Sequences at most, so that the engine's buffers have room for them.
pub(super) const STREAMS_MAX: u32 = 32;
/// Steps that are measured of each batch.
const STEPS: u32 = 16;
/// Samples of each peak in a repeat: others of the machine take a fifth of the speed of reading within seconds.
const PEAKS: u32 = 5;
/// Streams, and the chunk that is computed beside them.
const MIXED: (u32, u32) = (4, 124);

/// What was measured, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    machine: String,
    threads: u32,
    command: String,
    instructions: &'static str,
    /// Medians.
    peaks: Peaks,
    load_seconds: f64,
    /// `None`: the system does not tell.
    resident_bytes: Option<u64>,
    rows: Vec<Row>,
}

/// Tokens a second of one kind of work.
#[derive(Debug, Serialize)]
struct Row {
    what: String,
    n: usize,
    tokens_per_second: f64,
    lower_quartile: f64,
    upper_quartile: f64,
    /// At the median peaks.
    limit_tokens_per_second: f64,
    share_of_limit: f64,
}

/// One kind of work. It may not fit the model or the memory.
#[derive(Clone, Copy, Debug)]
enum Work {
    Prompt(u32),
    /// Streams, and the positions before them.
    Decode(u32, u32),
    /// Streams beside a chunk.
    Mixed(u32, u32),
}

impl Work {
    fn all() -> Vec<Self> {
        let prompts = PROMPTS.map(Self::Prompt);
        let depths = DEPTHS.map(|depth| Self::Decode(1, depth));
        let streams = STREAM_DEPTHS.map(|depth| STREAMS.map(|streams| Self::Decode(streams, depth)));
        let mixed = [Self::Mixed(MIXED.0, MIXED.1)];
        let streams = streams.into_iter().flatten();
        prompts.into_iter().chain(depths).chain(streams).chain(mixed).collect()
    }

    fn words(self) -> String {
        match self {
            Self::Prompt(tokens) => format!("prompt of {tokens}"),
            Self::Decode(1, depth) => format!("1 stream at {depth}"),
            Self::Decode(streams, depth) => format!("{streams} streams at {depth}"),
            Self::Mixed(streams, chunk) => format!("{streams} streams at 128 beside chunks of {chunk}"),
        }
    }

    fn has_room(self, rig: &Rig) -> bool {
        match self {
            Self::Prompt(tokens) => rig.has_room(1, tokens + 2),
            Self::Decode(streams, depth) => rig.has_room(streams, depth + streams + STEPS + 2),
            Self::Mixed(streams, chunk) => rig.has_room(streams + 1, 4 * chunk + 256),
        }
    }

    /// The steps that count.
    fn measure(self, rig: &mut Rig) -> anyhow::Result<Vec<Timed>> {
        match self {
            Self::Prompt(tokens) => prompt(rig, tokens),
            Self::Decode(streams, depth) => decode(rig, streams, depth),
            Self::Mixed(streams, chunk) => mixed(rig, streams, chunk),
        }
    }
}

fn prompt(rig: &mut Rig, tokens: u32) -> anyhow::Result<Vec<Timed>> {
    let mut load = rig.load(CHUNK_TOKENS);
    load.add(tokens, 1)?;
    let mut steps = Vec::new();
    while let Some(timed) = load.step()? {
        steps.push(timed);
    }
    Ok(steps)
}

/// Prompts are computed one after the other, and who is early decodes meanwhile: so early ones have more tokens to make.
fn decode(rig: &mut Rig, streams: u32, depth: u32) -> anyhow::Result<Vec<Timed>> {
    // A whole prompt fits beside all other rows.
    let mut load = rig.load((CHUNK_TOKENS.max(depth) + streams).min(CHUNK_MAX));
    for number in 0..streams {
        load.add(depth, streams - number + STEPS + 1)?;
    }
    let mut steps = Vec::new();
    while let Some(timed) = load.step()? {
        if timed.shape.prefill_tokens == 0 && timed.shape.decode_rows == u64::from(streams) {
            steps.push(timed);
        }
    }
    // The first step after a prompt finds cold caches.
    Ok(steps.split_off(steps.len().min(1)))
}

fn mixed(rig: &mut Rig, streams: u32, chunk: u32) -> anyhow::Result<Vec<Timed>> {
    let mut load = rig.load(streams + chunk);
    for _ in 0..streams {
        load.add(128, 64)?;
    }
    let (mut steps, mut is_added) = (Vec::new(), false);
    while let Some(timed) = load.step()? {
        let all_decode = timed.shape.decode_rows == u64::from(streams);
        if all_decode && !is_added {
            load.add(4 * chunk, 1)?;
            is_added = true;
        }
        if all_decode && timed.shape.prefill_tokens > 0 {
            steps.push(timed);
        }
    }
    Ok(steps)
}

pub(super) fn run(args: &EngineArgs, opening: &Opening<'_>) -> anyhow::Result<Exit> {
    ensure!(
        matches!(args.engine, EngineKind::Cpu),
        "--limits is about the CPU engine; leave --engine out"
    );
    let model = Model::open(&opening.path)?;
    let weight_bytes = engine::weights_bytes(&model, args.numerics)?;
    let began = Instant::now();
    let (mut rig, model_name) = opening.open()?;
    let load_seconds = began.elapsed().as_secs_f64();
    let costs = ModelCosts::new(model.config(), args.numerics, weight_bytes, rig.kv_bytes_per_token());
    let machine = Machine::new(args.threads as usize);
    let range = Range::new(usize::try_from(weight_bytes)?).context("no memory as large as the weights")?;
    let works: Vec<Work> = Work::all().into_iter().filter(|work| work.has_room(&rig)).collect();
    say!(
        "measuring {model_name}: {} kinds of work, {} times",
        works.len(),
        args.repeats
    );
    // Warm: memory is touched.
    prompt(&mut rig, CHUNK_TOKENS.min(model.config().context_length as u32 / 2))?;
    let (mut peaks, mut steps) = (Vec::new(), vec![Vec::new(); works.len()]);
    for _ in 0..args.repeats {
        peaks.extend((0..PEAKS).map(|_| Peaks {
            int8_ops_per_second: machine.int8_dot(),
            f32_ops_per_second: machine.f32_fma(),
            read_bytes_per_second: machine.read(&range),
        }));
        for (work, steps) in works.iter().zip(&mut steps) {
            steps.push(work.measure(&mut rig)?);
        }
    }
    drop(range);
    let peaks = median_peaks(&peaks);
    let rows = works.iter().zip(&steps);
    let rows = rows.map(|(work, steps)| row(work.words(), steps, |timed| costs.least(&timed.shape, &peaks)));
    let report = Report {
        model: model_name,
        machine: report::machine(),
        threads: args.threads,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        instructions: machine.instructions(),
        peaks,
        load_seconds,
        resident_bytes: resident_bytes(),
        rows: rows.collect::<anyhow::Result<_>>()?,
    };
    let json = serde_json::to_string_pretty(&report)?;
    // A file that cannot be written must not take what was measured with it.
    let written = write(args, &json);
    let printed = print(&report, args.json.then_some(json.as_str()));
    written?;
    printed?;
    Ok(Exit::Ok)
}

/// Each by itself.
fn median_peaks(all: &[Peaks]) -> Peaks {
    let of = |of: fn(&Peaks) -> f64| median(all.iter().map(of).collect());
    Peaks {
        int8_ops_per_second: of(|peaks| peaks.int8_ops_per_second),
        f32_ops_per_second: of(|peaks| peaks.f32_ops_per_second),
        read_bytes_per_second: of(|peaks| peaks.read_bytes_per_second),
    }
}

/// `repeats`: the steps of each repeat. All of them did the same.
fn row(what: String, repeats: &[Vec<Timed>], least: impl Fn(&Timed) -> f64) -> anyhow::Result<Row> {
    let tokens = |timed: &Timed| (timed.shape.prefill_tokens + timed.shape.decode_rows) as f64;
    let rate = |steps: &Vec<Timed>, seconds: &dyn Fn(&Timed) -> f64| {
        steps.iter().map(tokens).sum::<f64>() / steps.iter().map(seconds).sum::<f64>()
    };
    let first = repeats.first().with_context(|| format!("{what} was not measured"))?;
    let rates = Samples::new(repeats.iter().map(|steps| rate(steps, &|timed| timed.seconds)));
    let percentile = |percent| rates.percentile(percent).with_context(|| format!("{what} has no step"));
    let (median, limit) = (percentile(50.0)?, rate(first, &least));
    Ok(Row {
        n: repeats.len(),
        tokens_per_second: median,
        lower_quartile: percentile(25.0)?,
        upper_quartile: percentile(75.0)?,
        limit_tokens_per_second: limit,
        share_of_limit: median / limit,
        what,
    })
}

fn print(report: &Report, json: Option<&str>) -> anyhow::Result<()> {
    let mut out = crate::stdout::stdout();
    if let Some(json) = json {
        writeln!(out, "{json}")?;
        return Ok(());
    }
    writeln!(out, "{}, {} threads, {}", report.model, report.threads, report.machine)?;
    writeln!(
        out,
        "the machine, {}: {:.0} Gop/s of 8-bit products, {:.0} Gop/s in f32, {:.1} GB/s of reading as much as the weights",
        report.instructions,
        report.peaks.int8_ops_per_second / 1e9,
        report.peaks.f32_ops_per_second / 1e9,
        report.peaks.read_bytes_per_second / 1e9
    )?;
    let mut table = Table::new(&["what", ">tokens/s", ">quartiles", ">limit", ">share", ">n"]);
    for row in &report.rows {
        table.row(vec![
            row.what.as_str().into(),
            format!("{:.1}", row.tokens_per_second).into(),
            format!("{:.1} to {:.1}", row.lower_quartile, row.upper_quartile).into(),
            format!("{:.0}", row.limit_tokens_per_second).into(),
            format!("{:.0} %", row.share_of_limit * 100.0).into(),
            row.n.to_string().into(),
        ]);
    }
    out.write_all(table.render(Terminal::plain()).as_bytes())?;
    write!(out, "loaded in {:.2} s", report.load_seconds)?;
    match report.resident_bytes {
        Some(bytes) => writeln!(out, "; {:.0} MB resident", bytes as f64 / 1e6)?,
        None => writeln!(out)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use simulator::costs::StepShape;

    use super::*;

    #[test]
    fn a_rate_is_the_tokens_of_all_steps_by_their_time() {
        let step = |tokens: u32, seconds| {
            let mut shape = StepShape::default();
            shape.add(tokens, 0, 0);
            Timed { shape, seconds }
        };
        let repeats = [
            vec![step(100, 0.5), step(100, 1.5)],
            vec![step(100, 1.0), step(100, 3.0)],
            vec![step(100, 0.5), step(100, 0.5)],
        ];
        let row = row("a prompt".to_owned(), &repeats, |_| 0.25).expect("a row");
        assert_eq!(
            (row.tokens_per_second, row.limit_tokens_per_second, row.n),
            (100.0, 400.0, 3)
        );
        assert_eq!(row.share_of_limit, 0.25);
        assert!(row.lower_quartile <= row.tokens_per_second && row.tokens_per_second <= row.upper_quartile);
    }
}
