//! `baton status`: is the cluster ready, and if not, what is missing and what to do.

use clap::Args;
use coordinator::records::pages::{ClusterPage, NodePage};

use super::client::{AdminClient, parse};
use super::cluster::{is_ready, membership_words, waiting_words, why_not};
use super::format::{bytes, clean, seconds};
use super::look::Look;
use super::table::{Cell, Table};
use super::{Output, OutputArgs, UrlArgs, json, nodes};
use crate::exit::Exit;
use crate::stdout::print_result;
use crate::terminal::Paint;

const EXAMPLES: &str = "\
Examples:
  baton status                          is it ready, and what to do if not
  baton status && baton chat hello      exit status 0 means ready, 1 not ready, 4 that nobody answers
  baton status -o json | jq .coordinator.readiness";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct StatusArgs {
    #[command(flatten)]
    pub url: UrlArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

pub fn run(args: &StatusArgs) -> anyhow::Result<Exit> {
    super::run_until_signal(status(args, print_result))
}

async fn status(args: &StatusArgs, mut show: impl FnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<Exit> {
    let client = AdminClient::new(&args.url)?;
    let path = ["admin", "cluster"];
    let page = client.page(&path, &[]).await?;
    let cluster: ClusterPage = parse(&path, &page)?;
    match args.output.format() {
        Output::Json => show(&json(&page)?)?,
        Output::Table => show(&render(&cluster, client.base(), Look::stdout(false)))?,
    }
    Ok(if is_ready(&cluster.coordinator) {
        Exit::Ok
    } else {
        Exit::Failure
    })
}

fn render(cluster: &ClusterPage, url: &str, look: Look) -> String {
    let coordinator = &cluster.coordinator;
    let terminal = look.terminal;
    let mut lines = Vec::new();
    if is_ready(coordinator) {
        let words = format!("ready: {} at {url}", coordinator.model.as_deref().unwrap_or_default());
        lines.push(terminal.paint(&clean(&words), Paint::Good));
        if let Some(because) = &coordinator.unsplit_because {
            lines.push(terminal.paint(&clean(&format!("unsplit: {because}")), Paint::Warn));
            let todo = what_to_do(cluster, url);
            lines.extend(todo.into_iter().map(|todo| clean(&format!("  do: {todo}"))));
        }
    } else {
        let because = coordinator.not_ready_because.as_deref();
        let because = because.unwrap_or("the coordinator does not say why");
        lines.push(terminal.paint(&clean(&format!("not ready: {because}")), Paint::Bad));
        let todo = what_to_do(cluster, url);
        lines.extend(todo.into_iter().map(|todo| clean(&format!("  do: {todo}"))));
    }
    lines.push(clean(&format!(
        "coordinator {}, up {}; waiting: {}; {} unfinished",
        coordinator.version,
        seconds(coordinator.uptime_s as f64),
        waiting_words(coordinator),
        coordinator.unfinished
    )));
    lines.extend(suspected_words(cluster).map(|words| terminal.paint(&clean(&words), Paint::Warn)));
    lines.extend(membership_words(&cluster.membership).map(|words| clean(&words)));
    let mut text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    if !cluster.nodes.is_empty() {
        text.push('\n');
        text.push_str(&nodes_table(cluster).render(terminal));
    }
    if !cluster.pairs.is_empty() {
        text.push('\n');
        text.push_str(&pairs_table(cluster).render(terminal));
    }
    text
}

/// `None` when no node is suspected.
fn suspected_words(cluster: &ClusterPage) -> Option<String> {
    let suspected = cluster.nodes.iter().filter(|node| node.state == "suspected");
    let names: Vec<&str> = suspected.map(|node| node.name.as_str()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "suspected: {}; connections to it broke or its engine failed requests, so other nodes get new work for a moment (30 s at most)",
            names.join(", ")
        )
    })
}

/// The first step that helps, in the order in which a cluster comes up.
fn what_to_do(cluster: &ClusterPage, url: &str) -> Vec<String> {
    let coordinator = &cluster.coordinator;
    if coordinator.readiness == "draining" {
        return vec!["wait until it has ended, then start it again: it takes no new requests".to_owned()];
    }
    let control = &coordinator.control;
    if cluster.nodes.is_empty() {
        return vec![format!(
            "start nodes that join {control} (deploy/README.md), or a whole cluster here: baton up"
        )];
    }
    let node_ready = |node: &NodePage| node.state == "ready";
    let mut todo: Vec<String> = cluster
        .nodes
        .iter()
        .filter(|node| !node_ready(node) && node.state != "left")
        .map(|node| match &*node.state {
            "joining" => format!("wait for {}, which is joining; its log says how far it is", node.name),
            "draining" => format!("start another node for {}, which is draining", node.name),
            _ => format!(
                "look at {} ({}), which is {}: does it run, is it reachable?",
                node.name, node.address, node.state
            ),
        })
        .collect();
    let has = |role: &str| cluster.nodes.iter().any(|node| node_ready(node) && node.role == role);
    if !has("decode") && !has("co-located") {
        todo.push(format!("start a decode node that joins {control} (deploy/README.md)"));
    } else if has("decode") && !has("prefill") {
        todo.push(format!("start a prefill node that joins {control} (deploy/README.md)"));
    } else if !cluster.pairs.is_empty() && cluster.pairs.iter().all(|pair| !pair.is_usable) {
        todo.push("no pair can exchange KV: see the reasons below, and `baton nodes` for transports".to_owned());
    }
    if todo.is_empty() {
        todo.push(format!(
            "read the coordinator's log; ask again: baton status --url {url}"
        ));
    }
    todo
}

fn nodes_table(cluster: &ClusterPage) -> Table {
    let mut table = Table::new(&["node", "role", "state", "load", "KV use"]);
    for node in &cluster.nodes {
        table.row(vec![
            Cell::new(&node.name),
            Cell::new(&node.role),
            nodes::state(node),
            nodes::load(node).into(),
            nodes::kv_use(node).into(),
        ]);
    }
    table
}

fn pairs_table(cluster: &ClusterPage) -> Table {
    let mut table = Table::new(&["pair", "usable", ">handoffs", ">KV moved", "why not"]);
    for pair in &cluster.pairs {
        let usable = if pair.is_usable {
            Cell::new("yes").paint(Paint::Good)
        } else {
            Cell::new("no").paint(Paint::Bad)
        };
        table.row(vec![
            Cell::new(format!("{} > {}", pair.prefill, pair.decode)),
            usable,
            pair.handoffs_total.to_string().into(),
            bytes(pair.kv_bytes_total).into(),
            why_not(pair).into(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::records;
    use crate::observe::test_kit::{Answer, TestServer, bent, nobody};

    const PAGE: &str = include_str!("../../testdata/cluster.json");

    async fn status_of(url: &str, output: Output) -> (String, anyhow::Result<Exit>) {
        let args = StatusArgs {
            url: UrlArgs::of(url),
            output: OutputArgs { output, json: false },
        };
        let mut shown = String::new();
        let ended = status(&args, |text| {
            shown.push_str(text);
            Ok(())
        })
        .await;
        (shown, ended)
    }

    #[tokio::test]
    async fn the_exit_status_is_the_readiness() {
        let not_ready = PAGE.replace("\"readiness\": \"ready\"", "\"readiness\": \"not_ready\"");
        for (page, expected) in [(PAGE, Exit::Ok), (not_ready.as_str(), Exit::Failure)] {
            for output in [Output::Table, Output::Json] {
                let server = TestServer::start(vec![Answer::json("/admin/cluster", page)]).await;
                let (shown, ended) = status_of(&server.url, output).await;
                assert_eq!(ended.expect("a page"), expected, "{shown}");
                assert!(shown.contains("prefill-0"), "{shown}");
            }
        }
        let (_, ended) = status_of(&nobody().await, Output::Table).await;
        assert_eq!(crate::exit::of(&ended.expect_err("nobody")), Exit::Unreachable);
    }

    #[tokio::test]
    async fn what_is_no_coordinator_is_a_failure_that_says_so() {
        for answer in [
            Answer::json("/admin/cluster", "<html>"),
            Answer::json("/admin/cluster", "{\"nodes\": 3}"),
            Answer::with_status("/other", "200 OK", ""),
            Answer::with_status(
                "/admin/cluster",
                "503 Service Unavailable",
                "{\"error\":{\"message\":\"busy\"}}",
            ),
        ] {
            let server = TestServer::start(vec![answer]).await;
            let (_, ended) = status_of(&server.url, Output::Table).await;
            let error = ended.expect_err("no page");
            assert_eq!(crate::exit::of(&error), Exit::Failure, "{error:#}");
        }
    }

    #[test]
    fn whatever_is_missing_there_is_something_to_do() {
        let mut cluster: ClusterPage = records::parse(&serde_json::from_str(PAGE).expect("JSON")).expect("fits");
        let todo = |cluster: &ClusterPage| what_to_do(cluster, "http://x").join("; ");
        cluster.coordinator.readiness = "not_ready".into();
        cluster.pairs.iter_mut().for_each(|pair| pair.is_usable = false);
        assert!(todo(&cluster).contains("pair"), "{}", todo(&cluster));
        cluster.nodes.retain(|node| node.role != "prefill");
        assert!(todo(&cluster).contains("prefill node"), "{}", todo(&cluster));
        cluster.nodes.iter_mut().for_each(|node| node.state = "lost".into());
        assert!(todo(&cluster).contains("decode-0") && todo(&cluster).contains("decode node"));
        cluster.nodes.clear();
        assert!(todo(&cluster).contains("baton up"));
        assert!(!todo(&ClusterPage::default()).is_empty());
    }

    #[test]
    fn unsplit_and_suspicion_are_told_of_a_ready_cluster() {
        let mut cluster: ClusterPage = records::parse(&serde_json::from_str(PAGE).expect("JSON")).expect("fits");
        let told = |cluster: &ClusterPage| render(cluster, "http://x", Look::plain(80));
        let split = told(&cluster);
        assert!(!split.contains("unsplit") && !split.contains("suspected: "), "{split}");
        cluster.coordinator.unsplit_because = Some("no prefill node is ready (1 known)".to_owned());
        cluster.nodes.retain(|node| node.role != "prefill");
        let unsplit = told(&cluster);
        for wanted in ["ready: ", "no prefill node is ready", "start a prefill node"] {
            assert!(unsplit.contains(wanted), "{wanted} in {unsplit}");
        }
        cluster.nodes[0].state = "suspected".into();
        assert!(told(&cluster).contains("suspected: decode-0"));
    }

    #[test]
    fn bent_pages_do_not_panic() {
        let clusters = bent(PAGE).filter_map(|page| records::parse::<ClusterPage>(&page).ok());
        let drawn = clusters.map(|cluster| render(&cluster, "http://x", Look::plain(80)));
        assert!(drawn.filter(|text| !text.contains('\x1b')).count() > 100);
    }
}
