//! `baton trace`: where the time of one request went, or which requests were the slowest.

mod bar;
mod overlap;
mod slowest;
mod waterfall;
mod words;

use anyhow::bail;
use clap::{Args, ValueEnum};
use coordinator::records::Page;
use coordinator::records::shape::Waterfall;
use serde_json::Value;

use super::client::{AdminClient, parse};
use super::look::Look;
use super::{UrlArgs, json};
use crate::exit::{Exit, ExitError};
use crate::stdout::print_result;
use crate::terminal::say;

const EXAMPLES: &str = "\
Examples:
  baton trace last                                  the newest request that has ended
  baton trace 7c0e1f9a-...                          by x-request-id, response id, trace id or seq
  baton trace --slowest 10                          the ten slowest, each with its cause
  baton trace last -o otlp > trace.json             for any tool that reads OTLP JSON";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct TraceArgs {
    /// The x-request-id, the response id, the trace id or the seq of a request; or `last`.
    #[arg(
        value_name = "ID|last",
        required_unless_present = "slowest",
        conflicts_with = "slowest"
    )]
    pub id: Option<String>,
    /// Instead of one request: the N slowest from end to end.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub slowest: Option<u16>,
    #[command(flatten)]
    pub url: UrlArgs,
    /// text: a drawing; json: the page that it is drawn from; otlp: the spans as OTLP JSON.
    #[arg(short, long, value_enum, default_value_t = TraceOutput::Text, value_name = "FORMAT")]
    pub output: TraceOutput,
    /// The same as `-o json`.
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
    /// Draw every span. Without it the drawing ends after 200.
    #[arg(long)]
    pub all: bool,
    /// Bars of ASCII characters only (as with TERM=dumb).
    #[arg(long)]
    pub ascii: bool,
}

impl TraceArgs {
    fn format(&self) -> TraceOutput {
        if self.json { TraceOutput::Json } else { self.output }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TraceOutput {
    #[default]
    Text,
    Json,
    Otlp,
}

pub fn run(args: &TraceArgs) -> anyhow::Result<Exit> {
    super::run_until_signal(trace(args, print_result))
}

async fn trace(args: &TraceArgs, mut show: impl FnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<Exit> {
    let client = AdminClient::new(&args.url)?;
    let look = Look::stdout(args.ascii);
    if let Some(count) = args.slowest {
        return slowest(args, &client, count, &mut show).await;
    }
    let id = match args.id.as_deref() {
        Some("last") | None => newest_ended(&client).await?,
        Some(id) => id.to_owned(),
    };
    let path = ["admin", "traces", id.as_str()];
    let query = match args.format() {
        TraceOutput::Otlp => Vec::new(),
        TraceOutput::Text | TraceOutput::Json => vec![("view", "waterfall".to_owned())],
    };
    let Some(page) = client.find(&path, &query).await? else {
        bail!(not_kept(&client, &id).await?);
    };
    if args.format() != TraceOutput::Text {
        show(&json(&page)?)?;
        return Ok(Exit::Ok);
    }
    let fall: Waterfall = parse(&path, &page)?;
    let spans_max = if args.all { usize::MAX } else { waterfall::SPANS_MAX };
    show(&waterfall::render(&fall, spans_max, look))?;
    Ok(Exit::Ok)
}

async fn slowest(
    args: &TraceArgs,
    client: &AdminClient,
    count: u16,
    show: &mut dyn FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Exit> {
    if args.format() == TraceOutput::Otlp {
        let error = anyhow::anyhow!("`-o otlp` is of one request; pick one of `baton trace --slowest {count}`");
        return Err(ExitError::new(Exit::Usage, error).into());
    }
    let path = ["admin", "requests"];
    let query = [
        ("slowest", "true".to_owned()),
        ("running", "false".to_owned()),
        ("limit", count.to_string()),
    ];
    let page: Value = client.page(&path, &query).await?;
    if args.format() == TraceOutput::Json {
        show(&json(&page)?)?;
        return Ok(Exit::Ok);
    }
    let page: Page = parse(&path, &page)?;
    if page.records.is_empty() {
        say!(
            "no request has ended yet; send one: baton chat --url {} hello",
            client.base()
        );
        return Ok(Exit::Ok);
    }
    show(&slowest::render(&page, Look::stdout(args.ascii)))?;
    say!("baton trace SEQ draws one of them");
    Ok(Exit::Ok)
}

async fn newest_ended(client: &AdminClient) -> anyhow::Result<String> {
    let query = [("running", "false".to_owned()), ("limit", "1".to_owned())];
    let page: Page = client.read(&["admin", "requests"], &query).await?;
    match page.records.first() {
        Some(record) => Ok(record.seq.to_string()),
        None => bail!(
            "no request has ended yet at {0}; send one: baton chat --url {0} hello",
            client.base()
        ),
    }
}

/// Tells a forgotten request from a server that has no such pages at all.
async fn not_kept(client: &AdminClient, id: &str) -> anyhow::Result<String> {
    let query = [("limit", "1".to_owned())];
    let page: Page = client.read(&["admin", "requests"], &query).await?;
    let (kept, forgotten) = (page.kept, page.forgotten);
    let id = super::format::clean(id);
    let newest = page.records.first().map_or_else(
        || "send one: baton chat hello".to_owned(),
        |record| {
            format!(
                "the newest is {}: baton trace {}",
                super::format::clean(&record.id),
                record.seq
            )
        },
    );
    Ok(format!(
        "no request `{id}` is kept at {}: it holds the last {kept} and has forgotten {forgotten} \
         (--request-records of the coordinator keeps more); {newest}",
        client.base()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::test_kit::{Answer, TestServer, nobody};
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: TraceArgs,
    }

    async fn traced(url: &str, words: &[&str]) -> (String, anyhow::Result<Exit>) {
        let words = [&["trace", "--url", url], words].concat();
        let args = Cli::try_parse_from(words).expect("flags").args;
        let mut shown = String::new();
        let ended = trace(&args, |text| {
            shown.push_str(text);
            Ok(())
        })
        .await;
        (shown, ended)
    }

    #[tokio::test]
    async fn last_asks_for_the_newest_ended_one() {
        let server = TestServer::start(vec![
            Answer::json("/admin/requests", r#"{"records":[{"seq":429,"id":"r"}]}"#),
            Answer::json("/admin/traces/429", include_str!("../../testdata/waterfall.json")),
        ])
        .await;
        let (shown, ended) = traced(&server.url, &["last"]).await;
        assert_eq!(ended.expect("drawn"), Exit::Ok);
        assert!(shown.contains("kv.send") && shown.contains("TTFT 281.0"), "{shown}");
        let expected = [
            "/admin/requests?running=false&limit=1",
            "/admin/traces/429?view=waterfall",
        ];
        assert_eq!(server.asked(), expected);
    }

    #[tokio::test]
    async fn json_is_the_page_that_is_drawn() {
        let fall = include_str!("../../testdata/waterfall.json");
        let server = TestServer::start(vec![Answer::json("/admin/traces/429", fall)]).await;
        let (shown, ended) = traced(&server.url, &["429", "--json"]).await;
        assert_eq!(ended.expect("a page"), Exit::Ok);
        let page = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        assert_eq!(page(&shown), page(fall));
    }

    #[tokio::test]
    async fn a_request_that_is_gone_is_told_from_a_server_that_is() {
        let kept = Answer::json(
            "/admin/requests",
            r#"{"records":[{"seq":9,"id":"r"}],"kept":5,"forgotten":2}"#,
        );
        let server = TestServer::start(vec![kept]).await;
        let (_, ended) = traced(&server.url, &["gone"]).await;
        let error = ended.expect_err("404");
        assert_eq!(crate::exit::of(&error), Exit::Failure);
        assert!(format!("{error:#}").contains("baton trace 9"), "{error:#}");
        let (_, ended) = traced(&nobody().await, &["gone"]).await;
        assert_eq!(crate::exit::of(&ended.expect_err("nobody")), Exit::Unreachable);
    }

    #[tokio::test]
    async fn otlp_of_many_is_a_usage_error() {
        let (_, ended) = traced("http://127.0.0.1:1", &["--slowest", "3", "-o", "otlp"]).await;
        assert_eq!(crate::exit::of(&ended.expect_err("usage")), Exit::Usage);
        assert!(Cli::try_parse_from(["trace"]).is_err(), "an id or --slowest");
    }
}
