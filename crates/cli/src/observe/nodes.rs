//! `baton nodes`: one row for each node, with its load and its own reports.

use clap::Args;
use coordinator::records::pages::{ClusterPage, NodePage};

use super::client::{AdminClient, parse};
use super::cluster;
use super::format::clean;
use super::look::Look;
use super::table::{Cell, Table};
use super::{Output, OutputArgs, UrlArgs, json, print};
use crate::exit::Exit;
use crate::terminal::{Paint, say};

const EXAMPLES: &str = "\
Examples:
  baton nodes                                         every node: role, state, load, KV, lease, clock
  baton nodes --url http://10.0.0.5:8000
  baton nodes -o json | jq -r '.[] | select(.state != \"ready\") | .name'";

/// The block use from which a node soon preempts or refuses.
const KV_HIGH: f64 = 0.9;

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct NodesArgs {
    #[command(flatten)]
    pub url: UrlArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

pub fn run(args: &NodesArgs) -> anyhow::Result<Exit> {
    super::run_until_signal(nodes(args, print))
}

async fn nodes(args: &NodesArgs, mut show: impl FnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<Exit> {
    let client = AdminClient::new(&args.url.url)?;
    let path = ["admin", "cluster"];
    let page = client.page(&path, &[]).await?;
    if args.output.format() == Output::Json {
        let nodes = page.get("nodes").cloned().unwrap_or_else(|| serde_json::json!([]));
        show(&json(&nodes)?)?;
        return Ok(Exit::Ok);
    }
    let cluster: ClusterPage = parse(&path, &page)?;
    if cluster.nodes.is_empty() {
        say!("no node has joined {}; `baton status` says what to do", client.base());
        return Ok(Exit::Ok);
    }
    show(&render(&cluster, Look::stdout(false)))?;
    Ok(Exit::Ok)
}

fn render(cluster: &ClusterPage, look: Look) -> String {
    let mut table = Table::new(&[
        "name",
        "role",
        "state",
        "epoch",
        "address",
        "load",
        "KV use",
        "version",
        ">lease left s",
        ">lease age s",
        "transports",
        ">clock ms",
    ]);
    for node in &cluster.nodes {
        let seconds = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), |ms| format!("{:.1}", ms / 1e3));
        let clock = node
            .clock
            .as_ref()
            .map(|clock| format!("{:+.2} ±{:.2}", clock.offset_ms, clock.error_ms));
        let kv = Cell::new(kv_use(node));
        let is_high = cluster::kv_use(node).is_some_and(|kv| kv.fraction() >= KV_HIGH);
        table.row(vec![
            Cell::new(&node.name).paint(Paint::Bold),
            Cell::new(&node.role),
            state(node),
            Cell::new(&node.epoch),
            Cell::new(&node.address),
            load(node).into(),
            if is_high { kv.paint(Paint::Warn) } else { kv },
            Cell::new(&node.version),
            seconds(node.lease_left_ms).into(),
            seconds(node.lease_age_ms).into(),
            node.transports.join(",").into(),
            clock.unwrap_or_else(|| "-".to_owned()).into(),
        ]);
    }
    let misfits = cluster.pairs.iter().filter(|pair| pair.unusable_because.is_some());
    let misfits = misfits.map(|pair| {
        let words = format!("{} > {}: {}", pair.prefill, pair.decode, cluster::why_not(pair));
        format!("{}\n", look.terminal.paint(&clean(&words), Paint::Bad))
    });
    table.render(look.terminal) + &misfits.collect::<String>()
}

pub(super) fn state(node: &NodePage) -> Cell {
    let paint = match &*node.state {
        "ready" => Paint::Good,
        "joining" | "draining" | "left" => Paint::Warn,
        _ => Paint::Bad,
    };
    Cell::new(&node.state).paint(paint)
}

/// `3 running, 1 waiting`.
pub(crate) fn load(node: &NodePage) -> String {
    match (node.running, node.waiting) {
        (None, None) => "-".to_owned(),
        (running, waiting) => format!(
            "{} running, {} waiting",
            running.unwrap_or_default(),
            waiting.unwrap_or_default()
        ),
    }
}

/// `26/1456 blocks (2%), 30 cached`.
pub(super) fn kv_use(node: &NodePage) -> String {
    cluster::kv_use(node).map_or_else(
        || "-".to_owned(),
        |kv| {
            let percent = kv.fraction() * 100.0;
            format!("{}/{} blocks ({percent:.0}%), {} cached", kv.used, kv.total, kv.cached)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::records;
    use crate::observe::test_kit::{Answer, TestServer};

    const PAGE: &str = include_str!("../../testdata/cluster.json");

    #[test]
    fn every_node_is_a_row_under_its_headings() {
        let cluster: ClusterPage = records::parse(&serde_json::from_str(PAGE).expect("JSON")).expect("fits");
        let text = render(&cluster, Look::plain(100));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + cluster.nodes.len(), "{text}");
        for heading in ["role", "state", "epoch", "address", "KV use", "version", "transports"] {
            let at = lines[0].find(heading).unwrap_or_else(|| panic!("no {heading}"));
            for line in &lines[1..] {
                assert!(
                    line[..at].ends_with(' ') && !line[at..].starts_with(' '),
                    "{heading}: {text}"
                );
            }
        }
    }

    #[test]
    fn a_pair_that_does_not_fit_has_a_line_with_the_facts() {
        let mut cluster: ClusterPage = records::parse(&serde_json::from_str(PAGE).expect("JSON")).expect("fits");
        let pair = &mut cluster.pairs[0];
        pair.is_usable = false;
        pair.unusable_reason = Some("incompatible".to_owned());
        pair.unusable_because = Some("block_tokens is 32 on prefill-0 and 16 on decode-0".to_owned());
        let text = render(&cluster, Look::plain(100));
        let line = "prefill-0 > decode-0: incompatible: block_tokens is 32 on prefill-0 and 16 on decode-0";
        assert_eq!(text.lines().last(), Some(line), "{text}");
    }

    #[tokio::test]
    async fn json_is_the_list_as_the_server_sent_it() {
        let server = TestServer::start(vec![Answer::json("/admin/cluster", PAGE)]).await;
        let args = NodesArgs {
            url: UrlArgs {
                url: server.url.clone(),
            },
            output: OutputArgs {
                output: Output::Json,
                json: false,
            },
        };
        let mut shown = String::new();
        let ended = nodes(&args, |text| {
            shown.push_str(text);
            Ok(())
        });
        assert_eq!(ended.await.expect("a page"), Exit::Ok);
        let list: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
        assert_eq!(list[0]["engine"], "cpu", "members that are not drawn are there too");
    }
}
