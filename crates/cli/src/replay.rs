//! `baton replay`: gives a flight record's events to a fresh core and compares every action, or asks what a change would do.

mod change;
mod prediction;
mod what_if;

use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use workload::flight_record::{
    Difference, EndReason, Ending, Header, Reader, RecordError, Replay, ReplayOptions, Shown, replay,
};

use crate::exit::{Exit, WithExit as _};
use what_if::WhatIfArgs;

const EXAMPLES: &str = "\
Examples:
  baton up --flight-record flight.record   a cluster whose coordinator keeps a record
  baton replay flight.record               decide everything again, and compare every action
  baton replay flight.record --until 12.5 --show 20
                                           the last 20 events up to 12.5 s after the first one
  baton replay flight.record --json
  baton replay flight.record --costs costs.json --what-if policy=round-robin
  baton replay flight.record --costs costs.json --what-if nodes=+1d
                                           the same traffic, simulated as it was and with one change";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct ReplayArgs {
    /// The flight record: a file that a coordinator with --flight-record wrote.
    file: PathBuf,
    /// Stop so many seconds after the first event.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    until: Option<Duration>,
    /// Show the last events with their actions, so many.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1_000))]
    show: u16,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    what_if: WhatIfArgs,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| "write a number of seconds, such as 12.5".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

pub fn run(args: &ReplayArgs) -> anyhow::Result<Exit> {
    let reader = open(&args.file)?;
    if let Some(change) = &args.what_if.what_if {
        return what_if::run(reader, change, (&args.what_if, args.json));
    }
    let header = reader.header().clone();
    let options = ReplayOptions {
        until: args.until,
        shown_max: usize::from(args.show),
    };
    let replay = replay(reader, options).with_context(|| args.file.display().to_string())?;
    let text = match args.json {
        true => json(&header, &replay)?,
        false => text(&args.file, &header, &replay),
    };
    crate::stdout::print_result(&text)?;
    Ok(if replay.is_equal() { Exit::Ok } else { Exit::NotMet })
}

fn open(path: &Path) -> anyhow::Result<Reader<BufReader<File>>> {
    let file = File::open(path)
        .with_context(|| format!("cannot open {}", path.display()))
        .exit(Exit::Usage)?;
    let opened = Reader::open(BufReader::new(file));
    let is_foreign = matches!(opened, Err(RecordError::NotARecord | RecordError::UnknownSchema { .. }));
    let opened = opened.with_context(|| path.display().to_string());
    if is_foreign { opened.exit(Exit::Usage) } else { opened }
}

fn json(header: &Header, replay: &Replay) -> anyhow::Result<String> {
    let value = serde_json::json!({
        "version": header.version,
        "coordinator": header.coordinator,
        "started_unix_ms": header.started_unix_ms,
        "is_equal": replay.is_equal(),
        "replay": replay,
    });
    Ok(format!("{}\n", serde_json::to_string_pretty(&value)?))
}

/// Writing to a string cannot fail.
fn text(file: &Path, header: &Header, replay: &Replay) -> String {
    let mut out = String::new();
    for shown in &replay.shown {
        show(&mut out, shown);
    }
    let share = 100.0 * replay.equal_events as f64 / replay.events.max(1) as f64;
    let _ = writeln!(
        out,
        "{}: one life of {}, written by baton {}, policy {}\n\
         events   {} in {:.3} s, {} of them faults\n\
         actions  {}\n\
         equal    {} of {} events ({share:.3} %)\n\
         end      {}",
        file.display(),
        header.coordinator,
        header.version,
        header.config.routing.name(),
        replay.events,
        replay.span.as_secs_f64(),
        replay.faults,
        replay.actions,
        replay.equal_events,
        replay.events,
        words_of(replay.ending),
    );
    for (kind, count) in &replay.events_by_kind {
        let _ = writeln!(out, "  {count:>9}  {kind}");
    }
    if let Some(difference) = &replay.first_difference {
        show_difference(&mut out, difference);
        if header.version != env!("CARGO_PKG_VERSION") {
            let _ = writeln!(
                out,
                "Another version wrote this record, and versions may decide differently: replay it with baton {}.",
                header.version
            );
        }
    }
    out
}

fn words_of(ending: Option<Ending>) -> String {
    match ending {
        None => "not reached (--until)".to_owned(),
        Some(Ending::Cut) => "no end mark: the coordinator was killed, or still runs".to_owned(),
        Some(Ending::Marked(mark)) => match mark.reason {
            EndReason::Stopped => "the coordinator stopped in order".to_owned(),
            EndReason::SizeBound => format!("the file was full; lost {} events after it", mark.lost_events),
            EndReason::QueueFull => format!(
                "the disk was slower than the coordinator; lost {} events after it",
                mark.lost_events
            ),
        },
    }
}

fn show_event(out: &mut String, shown: &Shown) {
    let _ = writeln!(
        out,
        "{:>12.6} s  #{}  {}",
        shown.at.as_secs_f64(),
        shown.index,
        shown.event
    );
}

fn show(out: &mut String, shown: &Shown) {
    show_event(out, shown);
    for action in &shown.actions {
        let _ = writeln!(out, "                  -> {action}");
    }
}

fn show_difference(out: &mut String, difference: &Difference) {
    let _ = writeln!(out, "\nthe first difference, and the events before it:");
    for shown in &difference.before {
        show(out, shown);
    }
    show_event(out, &difference.at);
    let (recorded, replayed) = (&difference.at.actions, &difference.replayed_actions);
    for (word, actions) in [("recorded", recorded), ("replayed", replayed)] {
        let none = actions.is_empty().then(|| "nothing".to_owned());
        for action in actions.iter().chain(&none) {
            let _ = writeln!(out, "    {word}  -> {action}");
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ReplayArgs,
    }

    #[test]
    fn a_record_that_is_not_there_is_a_wrong_command_line() {
        let error = open(Path::new("/no/such/flight.record")).expect_err("no file");
        assert_eq!(crate::exit::of(&error), Exit::Usage);
    }

    #[test]
    fn limits_of_goodput_are_for_a_change_only() {
        let is_taken = |words: &str| {
            let line = Line::try_parse_from(std::iter::once("replay").chain(words.split_whitespace()));
            line.is_ok_and(|line| line.args.file == Path::new("flight.record"))
        };
        assert!(is_taken("flight.record"));
        let change = "flight.record --costs costs.json --what-if nodes=+1d";
        for limit in ["--slo-ttft-ms 500", "--slo-itl-ms 50"] {
            assert!(is_taken(&format!("{change} {limit}")), "{limit}");
            assert!(!is_taken(&format!("flight.record {limit}")), "{limit}");
        }
    }
}
