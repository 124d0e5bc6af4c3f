//! `baton record`: writes a trace of live traffic that has no content: times, lengths, lanes, shared blocks, turns.

mod follow;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use serde_json::json;
use tempfile::NamedTempFile;
use tokio::time::Instant;
use workload::recording;
use workload::trace::facts::TraceFacts;
use workload::trace::own_format;

use crate::exit::Exit;
use crate::observe::UrlArgs;
use crate::observe::client::AdminClient;
use crate::signals::Signals;
use crate::terminal::say;
use follow::{Follower, LeftOut};

const EXAMPLES: &str = "\
Examples:
  baton record --out monday.jsonl --for 10m         ten minutes of traffic
  baton record --out monday.jsonl                   until Ctrl-C
  baton plan xpyd --trace monday.jsonl --prefill-us-per-token 60 --decode-us-per-token 400";

/// How often the coordinator is asked. It keeps at least the last hundred records of long prompts, so this loses nothing.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// After the end of a recording, requests that run are awaited for so long.
const SETTLE_MAX: Duration = Duration::from_secs(30);
/// A coordinator that does not answer for so long ends the recording.
const SILENCE_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct RecordArgs {
    /// The trace to write. It is written when the recording ends, and replaces a file of this name.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    out: PathBuf,
    /// End after this time: 90s, 10m, 2h. Default: on Ctrl-C.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    time: Option<Duration>,
    /// End when so many prompts have been recorded. Each takes about 200 bytes of memory, and 8 more for each 16 tokens.
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1..=2_000_000))]
    prompts_max: u32,
    #[command(flatten)]
    url: UrlArgs,
    /// Print what was recorded as one JSON object: file and trace, the figures of the trace.
    #[arg(long)]
    json: bool,
}

/// `90s`, `10m`, `2h`.
fn duration(text: &str) -> Result<Duration, String> {
    let wanted = || format!("{text:?} is no time: write a whole number and s, m or h, such as 90s or 10m");
    let factor = match text.chars().last() {
        Some('s') => 1,
        Some('m') => 60,
        Some('h') => 3600,
        _ => return Err(wanted()),
    };
    let count: u64 = text[..text.len() - 1].parse().map_err(|_| wanted())?;
    let seconds = count
        .checked_mul(factor)
        .filter(|seconds| (1..=30 * 86_400).contains(seconds));
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| format!("{text:?} is not between 1 s and 30 days"))
}

pub fn run(args: &RecordArgs) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let mut signals = Signals::install().context("cannot listen for Ctrl-C")?;
        record(args, &mut signals).await
    })
}

async fn record(args: &RecordArgs, signals: &mut Signals) -> anyhow::Result<Exit> {
    let file = place(&args.out)?;
    let client = AdminClient::new(&args.url)?;
    let mut follower = Follower::start(&client).await?;
    let until = match args.time {
        Some(time) => format!("{} s, or until Ctrl-C", time.as_secs()),
        None => "until Ctrl-C".to_owned(),
    };
    say!("recording the traffic of {} for {until}; no text is kept", args.url.url);
    let ended = followed(args, (&mut follower, signals)).await;
    let (recorded, left_out) = follower.finish();
    told_left_out(&left_out);
    let exit = exit_of(ended, recorded.is_empty())?;
    let name = args.out.file_name().unwrap_or_default().to_string_lossy();
    let trace = recording::trace(&name, follow::BLOCK_TOKENS, recorded);
    write(file, &args.out, &own_format::write(&trace))?;
    let facts = TraceFacts::of(&trace);
    crate::stdout::print_result(&match args.json {
        true => format!("{}\n", json!({"file": args.out.display().to_string(), "trace": facts})),
        false => summary(&args.out, &facts),
    })?;
    Ok(exit)
}

/// The recording, until it has its name. A place that cannot be written to must show now, and not after the recording.
///
/// # Errors
/// Nothing can be written there, or a folder has this name.
fn place(out: &Path) -> anyhow::Result<NamedTempFile> {
    anyhow::ensure!(
        !out.is_dir(),
        "{} is a folder: name a file in it with --out",
        out.display()
    );
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))
        .with_context(|| format!("{} cannot be written", out.display()))
}

/// What a recording that broke has is written, and the status says why it broke.
///
/// # Errors
/// Nothing was recorded.
fn exit_of(ended: anyhow::Result<()>, is_empty: bool) -> anyhow::Result<Exit> {
    match ended {
        Err(error) if is_empty => Err(error.context("nothing was recorded")),
        Err(error) => {
            say!("the recording ends early: {error:#}");
            Ok(crate::exit::of(&error))
        }
        Ok(()) if is_empty => anyhow::bail!("no request was answered in that time, so there is nothing to write"),
        Ok(()) => Ok(Exit::Ok),
    }
}

/// Follows until the time is up, a signal comes, or the limit is reached; then waits for what still runs.
async fn followed(args: &RecordArgs, (follower, signals): (&mut Follower<'_>, &mut Signals)) -> anyhow::Result<()> {
    let ends_at = args.time.map(|time| Instant::now() + time);
    let mut heard_at = Instant::now();
    loop {
        let wait = ends_at.map_or(ASK_EVERY, |end| {
            end.saturating_duration_since(Instant::now()).min(ASK_EVERY)
        });
        let is_stopped = tokio::select! {
            () = tokio::time::sleep(wait) => false,
            _ = signals.next() => true,
        };
        match follower.catch_up().await {
            Ok(()) => heard_at = Instant::now(),
            Err(error) if heard_at.elapsed() > SILENCE_MAX => return Err(error),
            Err(error) => tracing::debug!("{error:#}"),
        }
        if follower.len() >= args.prompts_max as usize {
            say!("the limit of {} prompts is reached (--prompts-max)", args.prompts_max);
            return Ok(());
        }
        if is_stopped || ends_at.is_some_and(|end| end <= Instant::now()) {
            break;
        }
    }
    follower.stop();
    let settled_by = Instant::now() + SETTLE_MAX;
    while follower.are_some_running().await? && Instant::now() < settled_by {
        tokio::select! {
            () = tokio::time::sleep(ASK_EVERY) => {}
            // A second Ctrl-C: do not wait.
            _ = signals.next() => break,
        }
    }
    follower.catch_up().await
}

fn told_left_out(left_out: &LeftOut) {
    for (count, why) in [
        (
            left_out.missed,
            "missed: the coordinator had dropped their records before they were read (--request-records)",
        ),
        (left_out.early, "had begun before the recording, or came after its end"),
        (left_out.unanswered, "got no token: refused, failed or cancelled before"),
        (left_out.running, "still ran at the end"),
    ] {
        if count > 0 {
            say!("left out: {count} requests {why}");
        }
    }
    if left_out.restarts > 0 {
        say!(
            "the coordinator forgot the recording {} times (a restart, or a long pause of this program): requests before and after share no blocks, and some may be missing",
            left_out.restarts
        );
    }
}

fn write(mut file: NamedTempFile, out: &Path, text: &str) -> anyhow::Result<()> {
    let failed = || format!("{} cannot be written", out.display());
    file.write_all(text.as_bytes()).with_context(failed)?;
    file.as_file().sync_all().with_context(failed)?;
    file.persist(out).with_context(failed)?;
    Ok(())
}

fn summary(out: &Path, facts: &TraceFacts) -> String {
    let mut text = format!(
        "{}: {} requests in {:.1} s, {} conversations, prompts of {:.0} tokens and answers of {:.0} on average",
        out.display(),
        facts.requests,
        facts.duration_s,
        facts.conversations,
        facts.prompt_tokens.mean,
        facts.output_tokens.mean,
    );
    if let Some(prefixes) = &facts.prefixes {
        text += &format!(
            ", {:.1} % of the prompt tokens seen before",
            prefixes.hit_tokens * 100.0
        );
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::ExitError;
    use crate::observe::test_kit::{Answer, TestServer};

    #[test]
    fn a_place_that_cannot_take_the_trace_is_refused_before_the_recording() {
        let folder = tempfile::tempdir().expect("a folder");
        place(&folder.path().join("monday.jsonl")).expect("a new file");
        for bad in [folder.path(), &folder.path().join("missing/monday.jsonl")] {
            assert!(place(bad).is_err(), "{}", bad.display());
        }
    }

    #[test]
    fn a_recording_that_broke_says_why_with_its_status_also_when_it_is_empty() {
        let broken = || -> anyhow::Result<()> {
            Err(ExitError::new(Exit::Unreachable, anyhow::anyhow!("nobody answers")).into())
        };
        let failed = |ended| crate::exit::of(&exit_of(ended, true).expect_err("nothing was recorded"));
        assert_eq!((failed(broken()), failed(Ok(()))), (Exit::Unreachable, Exit::Failure));
        let kept = |ended| exit_of(ended, false).expect("something was recorded");
        assert_eq!((kept(broken()), kept(Ok(()))), (Exit::Unreachable, Exit::Ok));
    }

    /// What fails meanwhile is borne for a while, so the end of the time comes first.
    #[tokio::test]
    async fn a_coordinator_that_is_gone_at_the_end_is_unreachable_also_when_nothing_was_recorded() {
        let begin =
            r#"{"next_ended_from":5,"now_unix_ms":1000,"kept":5,"prefixes":{"block_tokens":16,"recording":"a"}}"#;
        let server = TestServer::start(vec![Answer::json("/admin/requests", begin)]).await;
        let args = RecordArgs {
            out: PathBuf::from("monday.jsonl"),
            time: Some(Duration::ZERO),
            prompts_max: 1,
            url: UrlArgs::of(&server.url),
            json: false,
        };
        let client = AdminClient::new(&args.url).expect("a URL");
        let mut follower = Follower::start(&client).await.expect("started");
        let mut signals = Signals::install().expect("signals");
        let ended = followed(&args, (&mut follower, &mut signals)).await;
        let error = exit_of(ended, true).expect_err("nobody answers");
        assert_eq!(crate::exit::of(&error), Exit::Unreachable, "{error:#}");
    }

    #[test]
    fn times_have_a_unit_and_limits() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7200)));
        for bad in [
            "",
            "10",
            "m",
            "-1s",
            "1.5h",
            "0s",
            "50000m",
            "99999999999999999999h",
            "10\u{b5}",
        ] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
