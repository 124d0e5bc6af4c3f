//! `baton drain NODE`: takes a node out of service and waits until it has left.

use anyhow::bail;
use clap::Args;
use coordinator::records::pages::{ClusterPage, NodePage};
use serde::Deserialize;

use super::{ForceArgs, Look, WAIT_S_MAX, watch};
use crate::exit::Exit;
use crate::observe::client::{AdminClient, parse};
use crate::observe::{UrlArgs, nodes, run_until_signal};
use crate::terminal::say;

const EXAMPLES: &str = "\
Examples:
  baton drain decode-0                 nothing new goes there; wait until what runs has ended and it has left
  baton drain decode-0 --wait 0        ask, and do not wait
  baton drain decode-0 --force         also when it is the only one that decodes, which ends service
  baton drain decode-0 && systemctl stop baton-decode   a drained node's process has ended already, with exit status 0";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct DrainArgs {
    /// Name of the node, as `baton nodes` shows it.
    #[arg(value_name = "NODE")]
    pub node: String,
    #[command(flatten)]
    pub url: UrlArgs,
    #[command(flatten)]
    pub force: ForceArgs,
    /// Seconds to wait until it has left; 0 does not wait. The node gives up what still runs after its own drain_ms_max.
    #[arg(long, default_value_t = 120, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=WAIT_S_MAX))]
    pub wait: u64,
}

/// The coordinator's answer.
#[derive(Debug, Deserialize)]
struct Asked {
    /// Of the node's life that drains. Without it nobody could tell this life from the next one.
    epoch: String,
}

pub fn run(args: &DrainArgs) -> anyhow::Result<Exit> {
    run_until_signal(drain(args))
}

async fn drain(args: &DrainArgs) -> anyhow::Result<Exit> {
    let client = AdminClient::new(&args.url)?;
    let path = ["admin", "nodes", &args.node, "drain"];
    let asked: Asked = parse(&path, &client.order(&path, &args.force.query()).await?)?;
    say!("{} is draining: nothing new goes there", args.node);
    if args.wait == 0 {
        return Ok(Exit::Ok);
    }
    let node_name = &args.node;
    let look = |cluster: &ClusterPage| {
        let is_it = |node: &&NodePage| node.name == *node_name && node.epoch == asked.epoch;
        let is_known = cluster.nodes.iter().any(|node| node.name == *node_name);
        Ok(match cluster.nodes.iter().find(is_it) {
            // A coordinator keeps a node that has left for minutes, or shows its next life.
            None if !is_known => bail!(
                "the coordinator has forgotten {node_name}, as after a restart: the node's log says whether it has drained"
            ),
            Some(node) if node.state == "lost" => bail!(
                "{node_name} was lost before it had drained: {} does not reach it; it hears of the drain if it comes back",
                client.base()
            ),
            Some(node) if node.state != "left" => Look::Going(nodes::load(node)),
            Some(_) | None => Look::Done(format!("{node_name} has left")),
        })
    };
    watch(&client, (&format!("{node_name} has not left"), args.wait), look).await?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::test_kit::{Answer, TestServer};

    const ASKED: &str = r#"{"node": "decode-0", "epoch": "00ff", "state": "draining"}"#;

    fn page(epoch: &str, state: &str) -> String {
        format!(r#"{{"nodes": [{{"name": "decode-0", "epoch": "{epoch}", "state": "{state}", "running": 2}}]}}"#)
    }

    async fn drained(answers: Vec<Answer>, wait: u64) -> anyhow::Result<Exit> {
        let server = TestServer::start(answers).await;
        let args = DrainArgs {
            node: "decode-0".to_owned(),
            url: UrlArgs::of(&server.url),
            force: ForceArgs::default(),
            wait,
        };
        let outcome = drain(&args).await;
        assert_eq!(server.asked()[0], "/admin/nodes/decode-0/drain");
        outcome
    }

    #[tokio::test]
    async fn it_waits_until_the_life_that_was_asked_is_gone() {
        let asked = || Answer::with_status("/admin/nodes/decode-0/drain", "202 Accepted", ASKED);
        let cluster = |epoch: &str, state: &str| Answer::json("/admin/cluster", &page(epoch, state));
        for end in [cluster("00ff", "left"), cluster("0100", "ready")] {
            let answers = vec![asked(), cluster("00ff", "draining"), end];
            assert_eq!(drained(answers, 20).await.expect("it left"), Exit::Ok);
        }
        let lost = vec![asked(), cluster("00ff", "draining"), cluster("00ff", "lost")];
        let error = drained(lost, 20)
            .await
            .expect_err("nobody knows whether it has drained");
        assert_eq!(crate::exit::of(&error), Exit::Failure);
        let late = vec![asked(), cluster("00ff", "draining"), cluster("00ff", "draining")];
        assert_eq!(drained(vec![asked()], 0).await.expect("asked"), Exit::Ok);
        let error = drained(late, 20).await.expect_err("the server is gone before the node");
        assert_eq!(crate::exit::of(&error), Exit::Unreachable);
    }

    #[tokio::test]
    async fn an_answer_without_the_life_that_drains_is_not_taken_for_its_end() {
        let asked = Answer::with_status("/admin/nodes/decode-0/drain", "202 Accepted", r#"{"node": "decode-0"}"#);
        let cluster = Answer::json("/admin/cluster", &page("00ff", "draining"));
        let error = drained(vec![asked, cluster], 20).await.expect_err("it still drains");
        assert_eq!(crate::exit::of(&error), Exit::Failure);
    }

    #[tokio::test]
    async fn a_node_that_a_restarted_coordinator_does_not_know_is_not_taken_for_drained() {
        let asked = Answer::with_status("/admin/nodes/decode-0/drain", "202 Accepted", ASKED);
        let cluster = Answer::json(
            "/admin/cluster",
            r#"{"nodes": [{"name": "decode-1", "epoch": "00ff"}]}"#,
        );
        let error = drained(vec![asked, cluster], 20).await.expect_err("nobody knows");
        assert_eq!(crate::exit::of(&error), Exit::Failure);
    }

    #[tokio::test]
    async fn an_unknown_node_is_a_failure_with_the_servers_words() {
        let body = r#"{"error": {"message": "No node is called `decode-0`. There are decode-1."}}"#;
        let refused = Answer::with_status("/admin/nodes", "404 Not Found", body);
        let error = drained(vec![refused], 5).await.expect_err("unknown");
        assert_eq!(crate::exit::of(&error), Exit::Failure);
        assert!(error.to_string().contains("decode-1"), "{error:#}");
    }
}
