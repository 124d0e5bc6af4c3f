//! `baton nodes`: one row for each node, with its load and its own reports.

use clap::Args;
use coordinator::records::pages::{ClusterPage, NodePage};

use super::client::{AdminClient, parse};
use super::cluster;
use super::format::{clean, fit_middle, or_dash, wrap};
use super::look::Look;
use super::table::{Cell, Table};
use super::{Output, OutputArgs, UrlArgs, json};
use crate::exit::Exit;
use crate::stdout::print_result;
use crate::terminal::{Paint, Terminal, say};

const EXAMPLES: &str = "\
Examples:
  baton nodes                                         every node: role, state, load, KV, lease, clock
  baton nodes --wide                                  every column, whole names
  baton nodes --url http://10.0.0.5:8000
  baton nodes -o json | jq -r '.[] | select(.state != \"ready\") | .name'";

/// The block use from which a node soon preempts or refuses.
const KV_HIGH: f64 = 0.9;
/// Columns of a name and of an address: a pod's name and an IPv6 address in short form keep what tells them apart.
const NAME_WIDTH_MAX: usize = 24;
/// What is left out where a line would be too long, the last one first.
const EXPENDABLE: [&str; 11] = [
    "KV used",
    "running",
    "waiting",
    "address",
    "lease left s",
    "clock ms",
    "cached",
    "transports",
    "version",
    "epoch",
    "lease age s",
];

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct NodesArgs {
    #[command(flatten)]
    pub url: UrlArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Every column and whole names, however long the lines become.
    #[arg(long)]
    pub wide: bool,
}

pub fn run(args: &NodesArgs) -> anyhow::Result<Exit> {
    super::run_until_signal(nodes(args, print_result))
}

async fn nodes(args: &NodesArgs, mut show: impl FnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<Exit> {
    let client = AdminClient::new(&args.url)?;
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
    let look = Look::stdout(false);
    let widths = match args.wide {
        true => Widths::UNLIMITED,
        false => Widths::within(look.width),
    };
    let (text, left_out) = render(&cluster, look.terminal, widths);
    show(&text)?;
    if !left_out.is_empty() {
        let left_out = left_out.join(", ");
        say!("not shown in {} columns: {left_out}; --wide shows all", look.width);
    }
    Ok(Exit::Ok)
}

/// The most columns of a line, and of a name in it.
#[derive(Clone, Copy, Debug)]
struct Widths {
    line_max: usize,
    name_max: usize,
}

impl Widths {
    const UNLIMITED: Self = Self {
        line_max: usize::MAX,
        name_max: usize::MAX,
    };

    fn within(line_max: usize) -> Self {
        Self {
            line_max,
            name_max: NAME_WIDTH_MAX,
        }
    }
}

/// The lines, and the headings of the columns that the width has no room for.
fn render(cluster: &ClusterPage, terminal: Terminal, widths: Widths) -> (String, Vec<String>) {
    let mut table = table(cluster, widths.name_max);
    let left_out = table.narrow(widths.line_max, &EXPENDABLE);
    let mut text = table.render(terminal);
    for pair in cluster.pairs.iter().filter(|pair| pair.unusable_because.is_some()) {
        let words = format!("{} > {}: {}", pair.prefill, pair.decode, cluster::why_not(pair));
        let words: Vec<String> = clean(&words).split(' ').map(str::to_owned).collect();
        for line in wrap(&words, " ", widths.line_max) {
            text.push_str(&terminal.paint(&line, Paint::Bad));
            text.push('\n');
        }
    }
    (text, left_out)
}

fn table(cluster: &ClusterPage, name_width_max: usize) -> Table {
    let mut table = Table::new(&[
        "name",
        "role",
        "state",
        "address",
        ">running",
        ">waiting",
        "KV used",
        ">cached",
        ">lease left s",
        "transports",
        "version",
        "epoch",
        ">lease age s",
        ">clock ms",
    ]);
    for node in &cluster.nodes {
        let seconds = |ms: Option<f64>| or_dash(ms.map(|ms| format!("{:.1}", ms / 1e3)));
        let clock = node.clock.as_ref();
        let clock = clock.map(|clock| format!("{:+.2} ±{:.2}", clock.offset_ms, clock.error_ms));
        let kv = cluster::kv_use(node);
        let used = kv.map(|kv| format!("{}/{} ({:.0}%)", kv.used, kv.total, kv.fraction() * 100.0));
        let used = Cell::new(or_dash(used));
        let is_high = kv.is_some_and(|kv| kv.fraction() >= KV_HIGH);
        table.row(vec![
            Cell::new(fit_middle(&node.name, name_width_max)).paint(Paint::Bold),
            Cell::new(&node.role),
            state(node),
            fit_middle(&node.address, name_width_max).into(),
            or_dash(node.running).into(),
            or_dash(node.waiting).into(),
            if is_high { used.paint(Paint::Warn) } else { used },
            or_dash(kv.map(|kv| kv.cached)).into(),
            seconds(node.lease_left_ms).into(),
            node.transports.join(",").into(),
            Cell::new(&node.version),
            Cell::new(&node.epoch),
            seconds(node.lease_age_ms).into(),
            or_dash(clock).into(),
        ]);
    }
    table
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
        let (text, left_out) = render(&cluster, Terminal::plain(), Widths::UNLIMITED);
        assert_eq!(left_out, Vec::<String>::new());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + cluster.nodes.len(), "{text}");
        for heading in ["role", "state", "epoch", "address", "KV used", "version", "transports"] {
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
    fn long_names_are_cut_and_columns_left_out_until_a_line_fits() {
        let mut cluster: ClusterPage = records::parse(&serde_json::from_str(PAGE).expect("JSON")).expect("fits");
        let usual = render(&cluster, Terminal::plain(), Widths::within(100)).1;
        assert!(
            !usual
                .iter()
                .any(|heading| ["KV used", "running", "address"].contains(&&**heading))
        );
        for node in &mut cluster.nodes {
            node.name = format!("{}-of-the-cluster-in-the-second-hall-rack-17", node.name);
            node.address = "[2001:db8:0:0:1111:2222:3333:4444]:7410".to_owned();
            node.transports = ["cuda-ipc", "nccl", "shm", "grpc"].map(str::to_owned).to_vec();
        }
        let pair = &mut cluster.pairs[0];
        pair.is_usable = false;
        pair.unusable_because = Some("block_tokens is 32 on the one and 16 on the other. ".repeat(5));
        for width in [60, 100] {
            let (text, left_out) = render(&cluster, Terminal::plain(), Widths::within(width));
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(longest <= Some(width), "{longest:?}: {text}");
            assert!(
                text.contains("prefill-0-of") && text.contains("rack-17"),
                "both ends: {text}"
            );
            assert!(left_out.iter().any(|heading| heading == "epoch"), "{left_out:?}");
        }
    }

    #[test]
    fn a_pair_that_does_not_fit_has_a_line_with_the_facts() {
        let mut cluster: ClusterPage = records::parse(&serde_json::from_str(PAGE).expect("JSON")).expect("fits");
        let pair = &mut cluster.pairs[0];
        pair.is_usable = false;
        pair.unusable_reason = Some("incompatible".to_owned());
        pair.unusable_because = Some("block_tokens is 32 on prefill-0 and 16 on decode-0".to_owned());
        let (text, _) = render(&cluster, Terminal::plain(), Widths::within(100));
        let line = "prefill-0 > decode-0: incompatible: block_tokens is 32 on prefill-0 and 16 on decode-0";
        assert_eq!(text.lines().last(), Some(line), "{text}");
    }

    #[tokio::test]
    async fn json_is_the_list_as_the_server_sent_it() {
        let server = TestServer::start(vec![Answer::json("/admin/cluster", PAGE)]).await;
        let args = NodesArgs {
            url: UrlArgs::of(&server.url),
            output: OutputArgs {
                output: Output::Json,
                json: false,
            },
            wide: false,
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
