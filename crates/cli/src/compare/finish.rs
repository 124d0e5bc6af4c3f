//! The end of every comparison: verdict, files, terminal, exit status.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use workload::comparison::{Arm, Comparison, Fairness};
use workload::report::Report;
use workload::summary::Summary;

use super::args::CompareArgs;
use super::conclude::conclude;
use super::fairness::Conduct;
use super::measure::Measured;
use super::{decision_record, output};
use crate::bench::load::environment;
use crate::date::today;
use crate::exit::Exit;
use crate::signals::Signals;
use crate::stdout::unless_reader_gone;
use crate::terminal::say;

/// What the parts before have left.
#[derive(Debug)]
pub(super) struct Finished {
    pub measured: Measured,
    pub arms: Vec<Arm>,
    pub conduct: Conduct,
    /// Shapes in which the gaps of running streams decide.
    pub streams: Vec<String>,
    pub environment: BTreeMap<String, Value>,
    pub took: Duration,
}

/// Writes the files and prints to `out`. Neither a reader that has gone away nor a file that cannot be written takes the rest with it:
/// the runs took an hour.
///
/// # Errors
/// A file cannot be written, or `out` takes nothing although somebody reads it.
pub(super) fn finish(
    args: &CompareArgs,
    finished: Finished,
    stop: &CancellationToken,
    out: &mut impl Write,
) -> anyhow::Result<Exit> {
    let Finished {
        measured,
        arms,
        mut conduct,
        streams,
        environment,
        took,
    } = finished;
    conduct.incomplete = measured.incomplete;
    let machine = environment::machine();
    let command = machine.get("client_command").and_then(Value::as_str);
    let mut comparison = Comparison {
        date: today(),
        command: command.unwrap_or("baton compare").to_owned(),
        hypothesis: args.hypothesis.clone(),
        slo: args.slo(),
        arms,
        shapes: measured.shapes,
        fairness: Fairness::default(),
        environment: machine,
    };
    comparison.environment.extend(environment);
    comparison
        .environment
        .insert("took_s".to_owned(), json!(took.as_secs()));
    comparison
        .environment
        .insert("handoffs".to_owned(), handoffs(&comparison));
    comparison
        .environment
        .insert("incomplete".to_owned(), json!(conduct.incomplete));
    let refused = conclude(&mut comparison, &conduct, &streams);
    let text = output::text(&comparison, &refused);
    let record = args
        .record
        .as_deref()
        .map(|path| decision_record::write(&comparison, &refused, path));
    let report = args
        .out
        .as_deref()
        .map(|folder| crate::report::write(&Report::of_comparison(comparison), folder));
    unless_reader_gone(out.write_all(text.as_bytes()).and_then(|()| out.flush()))?;
    if let (Some(written), Some(folder)) = (report, &args.out) {
        written?;
        say!("report: {}", folder.display());
    }
    if let (Some(written), Some(path)) = (record, &args.record) {
        written?;
        say!("decision record: {}", path.display());
    }
    say!("took {:.1} min", took.as_secs_f64() / 60.0);
    Ok(match (stop.is_cancelled(), refused.is_empty()) {
        (true, _) => Exit::Interrupted,
        (false, true) => Exit::Ok,
        (false, false) => Exit::NoVerdict,
    })
}

/// Makes the folders of all files that are written at the end. What cannot be written is known before the first run.
///
/// # Errors
/// A folder cannot be made, or nothing can be written into it.
pub(super) fn make_folders(args: &CompareArgs) -> anyhow::Result<()> {
    let files = [&args.record, &args.save_tuning].into_iter().flatten();
    for folder in files.filter_map(|file| file.parent()).chain(args.out.as_deref()) {
        // A file name alone has an empty parent, which is the working directory.
        let folder = Path::new(".").join(folder);
        std::fs::create_dir_all(&folder)
            .and_then(|()| tempfile::tempfile_in(&folder))
            .with_context(|| {
                format!(
                    "cannot write into {}: give another place for the results",
                    folder.display()
                )
            })?;
    }
    Ok(())
}

/// For each arm: requests whose KV was handed off, and those that the decode node prefilled, by reason.
fn handoffs(comparison: &Comparison) -> Value {
    let of = |arm: &Arm| {
        let runs = comparison
            .shapes
            .iter()
            .flat_map(|shape| &shape.runs)
            .filter(|run| run.arm == arm.name);
        let mut handed_off = 0;
        let mut local: BTreeMap<String, usize> = BTreeMap::new();
        for run in runs {
            let handoffs = Summary::of(&run.run, &comparison.slo).handoffs;
            handed_off += handoffs.handed_off;
            for (reason, count) in handoffs.local_prefill {
                *local.entry(reason).or_default() += count;
            }
        }
        (
            arm.name.clone(),
            json!({"handed_off": handed_off, "local_prefill": local}),
        )
    };
    comparison.arms.iter().map(of).collect::<serde_json::Map<_, _>>().into()
}

/// What the user's signals ask for.
#[derive(Clone, Debug, Default)]
pub(super) struct Stops {
    /// The first one: end with what is there.
    pub soon: CancellationToken,
    /// The second one. Nothing is written, and the nodes end with this process.
    pub at_once: CancellationToken,
}

/// # Errors
/// The system does not tell of signals.
pub(super) fn stop_on_signals() -> anyhow::Result<Stops> {
    let mut signals = Signals::install()?;
    let stops = Stops::default();
    let told = stops.clone();
    tokio::spawn(async move {
        signals.next().await;
        say!("stopping: what was measured is written, without a verdict; again stops at once");
        told.soon.cancel();
        signals.next().await;
        told.at_once.cancel();
    });
    Ok(stops)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::test_kit;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: CompareArgs,
    }

    #[test]
    fn folders_of_the_results_are_made_before_the_first_run() {
        let root = tempfile::tempdir().expect("a folder");
        let args = |record: &Path| {
            let record = record.to_str().expect("a path");
            let line = ["compare", "--record", record, "--save-tuning", "tuning.json"];
            <Line as clap::Parser>::try_parse_from(line).expect("arguments").args
        };
        let wanted = root.path().join("new/folder/decision.md");
        make_folders(&args(&wanted)).expect("they are made");
        assert!(root.path().join("new/folder").is_dir());
        std::fs::write(root.path().join("file"), "").expect("written");
        assert!(make_folders(&args(&root.path().join("file/decision.md"))).is_err());
    }

    #[test]
    fn a_reader_that_has_gone_costs_no_file_and_no_status() {
        let root = tempfile::tempdir().expect("a folder");
        let (record, out) = (root.path().join("decision.md"), root.path().join("report"));
        let args = |path: &Path| path.to_str().expect("a path").to_owned();
        let line = ["compare", "--record", &args(&record), "--out", &args(&out)];
        let args = <Line as clap::Parser>::try_parse_from(line).expect("arguments").args;
        let comparison = test_kit::comparison();
        let finished = Finished {
            measured: Measured {
                shapes: comparison.shapes,
                incomplete: Some("the time was up".to_owned()),
            },
            arms: comparison.arms,
            conduct: Conduct::default(),
            streams: Vec::new(),
            environment: BTreeMap::new(),
            took: Duration::from_secs(60),
        };
        let mut unread = crate::stdout::test_kit::unread();
        let exit = finish(&args, finished, &CancellationToken::new(), &mut unread).expect("finished");
        assert_eq!(exit, Exit::NoVerdict);
        assert!(record.is_file() && out.join("report.json").is_file());
    }

    #[test]
    fn handoffs_are_counted_for_each_arm() {
        let mut comparison = test_kit::comparison();
        let record = &mut comparison.shapes[0].runs[1].run.records[0];
        if let Some(server) = &mut record.server {
            server.local_prefill = Some("short".to_owned());
        }
        let counts = handoffs(&comparison);
        assert_eq!(counts["whole"]["handed_off"], 9);
        assert_eq!(counts["split"]["handed_off"], 8);
        assert_eq!(counts["split"]["local_prefill"]["short"], 1);
    }
}
