//! `baton tap`: requests of the live cluster, one line each as they end.

mod line;

use clap::Args;
use coordinator::records::shape::{RecordState, Summary};
use serde_json::Value;

use super::client::AdminClient;
use super::feed::{BackOff, Feed, News};
use super::filter::FilterArgs;
use super::look::Look;
use super::{Output, UrlArgs};
use crate::exit::Exit;
use crate::stdout::print;
use crate::terminal::say;

const EXAMPLES: &str = "\
Examples:
  baton tap                                         each request as it ends; Ctrl-C stops
  baton tap --breached --node decode-1              those that broke their SLO and ran on decode-1
  baton tap --all --lane interactive                also when received and at the first token
  baton tap -o json | jq .slow_because              one JSON object a line
  baton tap --slower-than-ms 2000 --count 5         the next five slow ones, then exit";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct TapArgs {
    #[command(flatten)]
    pub url: UrlArgs,
    #[command(flatten)]
    pub filter: FilterArgs,
    /// Also when a request is received and when its first token is sent.
    #[arg(long)]
    pub all: bool,
    /// Stop after this many lines.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// An aligned line, or a JSON object a line.
    #[arg(short, long, value_enum, default_value_t = Output::Table, value_name = "FORMAT")]
    pub output: Output,
    /// The same as `-o json`.
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
}

impl TapArgs {
    fn format(&self) -> Output {
        if self.json { Output::Json } else { self.output }
    }
}

pub fn run(args: &TapArgs) -> anyhow::Result<Exit> {
    super::run_until_signal(tap(args, BackOff::USUAL, print))
}

async fn tap(
    args: &TapArgs,
    back_off: BackOff,
    mut show: impl FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Exit> {
    let client = AdminClient::new(&args.url)?;
    let mut query = vec![("kinds", "request".to_owned())];
    query.extend(args.filter.query());
    let mut feed = Feed::connect(&client, query, back_off).await?;
    let look = Look::stdout(false);
    if args.format() == Output::Table {
        show(&line::heading(args.all, look))?;
    }
    let mut left = args.count;
    let mut is_told_of_unreadable = false;
    while left != Some(0) {
        match feed.next().await? {
            News::Request(record, raw) => {
                if args.all || record.state == RecordState::Ended {
                    show(&line_of(args, &record, (&raw, look))?)?;
                    left = left.map(|left| left - 1);
                }
            }
            News::Missed(count) => say!("lagged: {count} events are missing here; this reader was too slow"),
            News::Unreadable(what) if !is_told_of_unreadable => {
                is_told_of_unreadable = true;
                say!("passed over an {what}; are client and server of one version? (said once)");
            }
            News::Lost(why) => say!("the stream broke ({why}); connecting again"),
            News::Back => {
                say!(
                    "connected again; what ended in between is not shown here; the coordinator's page /admin/requests lists it"
                );
            }
            News::Unreadable(_) | News::Cluster(_) => {}
        }
    }
    Ok(Exit::Ok)
}

fn line_of(args: &TapArgs, record: &Summary, (raw, look): (&Value, Look)) -> anyhow::Result<String> {
    Ok(match args.format() {
        Output::Table => line::line(record, args.all, look),
        Output::Json => format!("{}\n", serde_json::to_string(raw)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::test_kit::{Answer, TestServer, nobody};
    use clap::Parser;
    use std::io::Write as _;
    use std::time::Duration;

    const QUICK: BackOff = BackOff {
        first: Duration::from_millis(1),
        longest: Duration::from_millis(1),
        attempts_max: 1,
    };

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: TapArgs,
    }

    async fn tapped(url: &str, flags: &[&str]) -> (String, anyhow::Result<Exit>) {
        let mut words = vec!["tap", "--url", url];
        words.extend(flags);
        let args = Cli::try_parse_from(words).expect("flags").args;
        let mut shown = String::new();
        let ended = tap(&args, QUICK, |text| {
            shown.push_str(text);
            Ok(())
        })
        .await;
        (shown, ended)
    }

    const EVENTS: &str = "event: request\ndata: {\"seq\":1,\"state\":\"received\"}\n\n\
        event: request\ndata: {\"seq\":1,\"state\":\"streaming\",\"ttft_ms\":3}\n\n\
        event: lagged\ndata: {\"missed\":2}\n\n\
        event: request\ndata: {\"seq\":1,\"state\":\"ended\",\"outcome\":\"ok\",\"news\":1}\n\n\
        event: request\ndata: {\"seq\":2,\"state\":\"ended\",\"outcome\":\"ok\"}\n\n";

    #[tokio::test]
    async fn ended_requests_are_lines_and_the_filters_are_the_servers() {
        let server = TestServer::start(vec![Answer::events(EVENTS)]).await;
        let (shown, ended) = tapped(&server.url, &["--lane", "batch", "--stalled", "--json", "--count", "2"]).await;
        assert_eq!(ended.expect("ended"), Exit::Ok);
        let lines: Vec<Value> = shown
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(
            (&lines[0]["seq"], &lines[0]["news"]),
            (&1.into(), &1.into()),
            "as it came"
        );
        assert_eq!(server.asked(), ["/admin/events?kinds=request&lane=batch&stalled=true"]);
    }

    #[tokio::test]
    async fn all_shows_every_step_and_a_server_that_is_gone_is_unreachable() {
        let server = TestServer::start(vec![Answer::events(EVENTS)]).await;
        let (shown, ended) = tapped(&server.url, &["--all"]).await;
        assert_eq!(shown.lines().count(), 5, "a heading and four lines: {shown}");
        assert_eq!(crate::exit::of(&ended.expect_err("gone")), Exit::Unreachable);
    }

    #[tokio::test]
    async fn no_server_is_unreachable_at_once() {
        let (_, ended) = tapped(&nobody().await, &[]).await;
        let error = ended.expect_err("nobody listens");
        assert_eq!(crate::exit::of(&error), Exit::Unreachable);
        assert!(format!("{error:#}").contains("baton up"), "{error:#}");
    }

    #[tokio::test]
    async fn a_reader_that_has_gone_ends_it_with_the_error_that_exits_quietly() {
        let server = TestServer::start(vec![Answer::events(EVENTS)]).await;
        let args = Cli::try_parse_from(["tap", "--url", &server.url]).expect("flags").args;
        let closed = |_: &str| Ok(write!(crate::stdout::test_kit::unread(), "x")?);
        let error = tap(&args, QUICK, closed).await.expect_err("closed");
        assert!(crate::stdout::is_reader_gone(&error), "{error:#}");
    }
}
