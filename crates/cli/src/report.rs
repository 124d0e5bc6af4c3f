//! `baton report`: makes the report of a stored comparison, or of one stored run, again.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context;
use clap::Args;
use serde::Deserialize;
use serde::de::IgnoredAny;
use workload::comparison::{Comparison, Slo};
use workload::record::Run;
use workload::report::{Report, RunFrame, synthetic};

use crate::bench::arguments::positive;
use crate::exit::{Exit, WithExit};
use crate::terminal::say;

const EXAMPLES: &str = "\
Examples:
  baton report report.json --out report                    of a comparison: HTML, Markdown, CSV and JSON
  baton report run.json --out run --ttft-ms 300 --itl-ms 50    of one run
  baton report --example --out example                     of made-up data, to see what a report shows";

/// A file is read whole. A comparison of a million requests has less.
const FILE_BYTES_MAX: u64 = 4 << 30;
/// The seed of the example: any would do.
const EXAMPLE_SEED: u64 = 1;

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ReportArgs {
    /// The JSON of `baton compare`, of one run, or of a row of `baton bench matrix`.
    #[arg(required_unless_present = "example")]
    pub file: Option<PathBuf>,
    /// The folder for report.html, report.md, report.csv and report.json; it is made when it is missing.
    #[arg(long)]
    pub out: PathBuf,
    /// Report made-up data instead of a file.
    #[arg(long, conflicts_with = "file")]
    pub example: bool,
    /// Limit of TTFT in ms, by which the requests of one run are judged. A comparison has its own.
    #[arg(long, default_value_t = 300.0, value_parser = positive)]
    pub ttft_ms: f64,
    /// Limit of the 99th percentile of a request's own gaps in ms, for one run.
    #[arg(long, default_value_t = 50.0, value_parser = positive)]
    pub itl_ms: f64,
}

pub fn run(args: &ReportArgs) -> anyhow::Result<Exit> {
    let report = match &args.file {
        Some(path) => read(path, args)?,
        None => Report::of_comparison(synthetic::comparison(EXAMPLE_SEED)),
    };
    write(&report, &args.out)?;
    say!("report: {}", args.out.join("report.html").display());
    Ok(Exit::Ok)
}

/// Writes `report.html` and its twins into the folder.
///
/// # Errors
/// The folder or a file cannot be written, or a figure is not finite.
pub fn write(report: &Report, folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let files = [
        ("report.html", report.html()),
        ("report.md", report.markdown()),
        ("report.csv", report.csv()),
    ];
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    for (name, text) in files {
        write(name, text)?;
    }
    // A figure that JSON does not have must not take the other files with it.
    write(
        "report.json",
        report.json().context("the comparison cannot be written as JSON")?,
    )
}

/// The members that tell a comparison from a run.
#[derive(Deserialize)]
struct Kind {
    shapes: Option<IgnoredAny>,
    records: Option<IgnoredAny>,
    run: Option<IgnoredAny>,
}

/// A row of `baton bench matrix`: a run, and what was expected of it.
#[derive(Deserialize)]
struct Row {
    run: Run,
    hypothesis: Option<String>,
}

impl Row {
    /// The run with the row's hypothesis, where a report looks for it.
    fn into_run(self) -> Run {
        let mut run = self.run;
        if let Some(hypothesis) = self.hypothesis {
            run.environment.insert("hypothesis".to_owned(), hypothesis.into());
        }
        run
    }
}

fn read(path: &Path, args: &ReportArgs) -> anyhow::Result<Report> {
    let text = contents(path).exit(Exit::Usage)?;
    parse(&text, args)
        .with_context(|| format!("{} is no report", path.display()))
        .exit(Exit::Usage)
}

/// # Errors
/// The file cannot be read, or is too large.
fn contents(path: &Path) -> anyhow::Result<Vec<u8>> {
    let shown = path.display();
    let bytes = std::fs::metadata(path)
        .with_context(|| format!("cannot read {shown}"))?
        .len();
    anyhow::ensure!(
        bytes <= FILE_BYTES_MAX,
        "{shown} has {bytes} bytes; at most {FILE_BYTES_MAX} are read"
    );
    std::fs::read(path).with_context(|| format!("cannot read {shown}"))
}

fn parse(text: &[u8], args: &ReportArgs) -> anyhow::Result<Report> {
    let kind: Kind = serde_json::from_slice(text).context("it is not a JSON object")?;
    if kind.shapes.is_some() {
        let comparison: Comparison =
            serde_json::from_slice(text).context("it has `shapes`, but is not a comparison")?;
        return Ok(Report::of_comparison(comparison));
    }
    let run: Run = match (kind.run.is_some(), kind.records.is_some()) {
        (true, _) => {
            let row: Row = serde_json::from_slice(text).context("it has `run`, but that is not a run")?;
            row.into_run()
        }
        (false, true) => serde_json::from_slice(text).context("it has `records`, but is not a run")?,
        (false, false) => anyhow::bail!(
            "it has neither `shapes`, as a comparison has, nor `records` or `run`, as a run has; give the report.json of `baton compare`, what `baton bench run --run-json` wrote, or a row of `baton bench matrix`"
        ),
    };
    let frame = RunFrame {
        slo: Slo {
            name: "custom".to_owned(),
            ttft_ms_max: args.ttft_ms,
            itl_ms_max: args.itl_ms,
        },
        date: started(&run),
        command: fact(&run, "client_command").unwrap_or("not recorded").to_owned(),
    };
    Ok(Report::of_run(run, frame))
}

fn fact<'a>(run: &'a Run, name: &str) -> Option<&'a str> {
    run.environment.get(name)?.as_str()
}

/// When the run began, as HTTP writes dates, in UTC.
fn started(run: &Run) -> String {
    let ms = run
        .environment
        .get("started_unix_ms")
        .and_then(serde_json::Value::as_u64);
    let at = ms.and_then(|ms| UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
    // The calendar of HTTP ends with the year 9999.
    let at = at.filter(|at| {
        at.duration_since(UNIX_EPOCH)
            .is_ok_and(|since| since.as_secs() < 253_402_300_800)
    });
    at.map_or_else(|| "date not recorded".to_owned(), httpdate::fmt_http_date)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(file: &Path, out: &Path) -> ReportArgs {
        ReportArgs {
            file: Some(file.to_owned()),
            out: out.to_owned(),
            example: false,
            ttft_ms: 300.0,
            itl_ms: 50.0,
        }
    }

    #[test]
    fn a_report_can_be_made_again_from_its_own_json() {
        let dir = tempfile::tempdir().expect("a folder");
        let (first, second) = (dir.path().join("first"), dir.path().join("second"));
        let mut comparison = synthetic::comparison(EXAMPLE_SEED);
        comparison.shapes.remove(0);
        let run_file = dir.path().join("run.json");
        std::fs::write(
            &run_file,
            serde_json::to_string(&comparison.shapes[0].runs[0].run).expect("JSON"),
        )
        .expect("written");
        write(&Report::of_comparison(comparison), &first).expect("written");
        run(&args(&first.join("report.json"), &second)).expect("made again");
        for name in ["report.html", "report.md", "report.csv", "report.json"] {
            let read = |folder: &Path| std::fs::read(folder.join(name)).expect("a file");
            assert!(read(&first) == read(&second), "{name}");
        }
        run(&args(&run_file, &second)).expect("a run");
        let html = std::fs::read_to_string(second.join("report.html")).expect("a file");
        assert!(html.contains("<h1>One run, not a comparison</h1>"));
    }

    #[test]
    fn a_row_of_a_matrix_is_a_run_with_its_hypothesis() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("row-A-cold.json");
        let comparison = synthetic::comparison(EXAMPLE_SEED);
        let measured = &comparison.shapes[0].runs[0].run;
        let row = serde_json::json!({"row": "A", "hypothesis": "bound by prefill", "run": measured});
        std::fs::write(&file, row.to_string()).expect("written");
        run(&args(&file, dir.path())).expect("a run");
        let html = std::fs::read_to_string(dir.path().join("report.html")).expect("a file");
        assert!(html.contains("<h1>One run, not a comparison</h1>") && html.contains("bound by prefill"));
    }

    #[test]
    fn other_files_are_refused_with_the_reason() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("x.json");
        for text in ["", "[1]", "{}", "{\"shapes\": 3}", "{\"records\": []}", "{\"run\": {}}"] {
            std::fs::write(&file, text).expect("written");
            let error = run(&args(&file, dir.path())).expect_err("refused");
            assert_eq!(crate::exit::of(&error), Exit::Usage, "{text}");
            assert!(format!("{error:#}").contains("x.json"));
        }
        let error = run(&args(&dir.path().join("none.json"), dir.path())).expect_err("no file");
        assert_eq!(crate::exit::of(&error), Exit::Usage);
    }
}
