//! `baton role NODE ROLE`: a node leaves the one pool and comes back in the other, without a new process.

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use coordinator::records::pages::{ClusterPage, NodePage};
use serde::Deserialize;
use serving_core::node::AssignedRole;

use super::{ForceArgs, Look, WAIT_S_MAX, watch};
use crate::exit::Exit;
use crate::observe::client::{AdminClient, parse};
use crate::observe::{UrlArgs, nodes, run_until_signal};
use crate::terminal::say;

const EXAMPLES: &str = "\
Examples:
  baton role prefill-1 decode              one node more that decodes, one less that prefills
  baton role prefill-1 prefill             and back
  baton role decode-0 colocated            a node that computes every prompt itself
  baton role decode-0 colocated --wait 0   ask, and do not wait

The node drains first, as with `baton drain`: what runs there ends or goes on elsewhere. Its process stays, with the
weights it has loaded; its KV cache begins empty. After a restart the process has the role it was started with.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoleWord {
    Prefill,
    Decode,
    #[value(name = "colocated", alias = "co-located")]
    CoLocated,
}

impl RoleWord {
    fn role(self) -> AssignedRole {
        match self {
            RoleWord::Prefill => AssignedRole::Prefill,
            RoleWord::Decode => AssignedRole::Decode,
            RoleWord::CoLocated => AssignedRole::CoLocated,
        }
    }
}

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct RoleArgs {
    /// Name of the node, as `baton nodes` shows it.
    #[arg(value_name = "NODE")]
    pub node: String,
    /// What it is to be.
    #[arg(value_name = "ROLE")]
    pub role: RoleWord,
    #[command(flatten)]
    pub url: UrlArgs,
    #[command(flatten)]
    pub force: ForceArgs,
    /// Seconds to wait until it is ready in its new role; 0 does not wait.
    #[arg(long, default_value_t = 120, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=WAIT_S_MAX))]
    pub wait: u64,
}

/// The coordinator's answer.
#[derive(Debug, Deserialize)]
struct Asked {
    epoch: String,
    /// Absent when the node has the role already.
    next_role: Option<String>,
}

pub fn run(args: &RoleArgs) -> anyhow::Result<Exit> {
    run_until_signal(change_role(args))
}

async fn change_role(args: &RoleArgs) -> anyhow::Result<Exit> {
    let client = AdminClient::new(&args.url)?;
    let role = args.role.role().name();
    let path = ["admin", "nodes", &args.node, "role", role];
    let asked: Asked = parse(&path, &client.order(&path, &args.force.query()).await?)?;
    if asked.next_role.is_none() {
        say!("{} is a {role} node already", args.node);
        return Ok(Exit::Ok);
    }
    say!("{} is draining, then it comes back as a {role} node", args.node);
    if args.wait == 0 {
        return Ok(Exit::Ok);
    }
    let look = |cluster: &ClusterPage| {
        let node = cluster.nodes.iter().find(|node| node.name == args.node);
        let node = node.with_context(|| format!("the coordinator has forgotten {}: read the node's log", args.node))?;
        Ok(match (node.epoch == asked.epoch, &*node.state) {
            (false, "ready") => Look::Done(came_back(node, role)?),
            (false, _) | (true, "left") => Look::Going("the old role's work is done".to_owned()),
            (true, "lost") => bail!(
                "{} was lost before it had drained: {} does not reach it; it hears of the order if it comes back",
                args.node,
                client.base()
            ),
            (true, _) => Look::Going(nodes::load(node)),
        })
    };
    watch(
        &client,
        (&format!("{} is not back as a {role} node", args.node), args.wait),
        look,
    )
    .await?;
    Ok(Exit::Ok)
}

/// A process that was restarted in the meantime has the role that it was started with.
fn came_back(node: &NodePage, role: &str) -> anyhow::Result<String> {
    let NodePage { name, role: now, .. } = node;
    ensure!(
        now == role,
        "{name} is back as a {now} node, not {role}: its process was started anew meanwhile; its log says why"
    );
    Ok(format!("{name} is a {role} node"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::test_kit::{Answer, TestServer};

    const PATH: &str = "/admin/nodes/prefill-1/role/decode";

    fn page(epoch: &str, role: &str, state: &str) -> Answer {
        let node = format!(r#"{{"name": "prefill-1", "epoch": "{epoch}", "role": "{role}", "state": "{state}"}}"#);
        Answer::json("/admin/cluster", &format!(r#"{{"nodes": [{node}]}}"#))
    }

    async fn changed(answers: Vec<Answer>, wait: u64) -> anyhow::Result<Exit> {
        let server = TestServer::start(answers).await;
        let args = RoleArgs {
            node: "prefill-1".to_owned(),
            role: RoleWord::Decode,
            url: UrlArgs::of(&server.url),
            force: ForceArgs::default(),
            wait,
        };
        let outcome = change_role(&args).await;
        assert_eq!(server.asked()[0], PATH);
        outcome
    }

    fn asked() -> Answer {
        let body = r#"{"node": "prefill-1", "epoch": "00ff", "state": "draining", "next_role": "decode"}"#;
        Answer::with_status(PATH, "202 Accepted", body)
    }

    #[tokio::test]
    async fn it_waits_for_the_new_life_in_the_new_role() {
        let draining = page("00ff", "prefill", "draining");
        let left = page("00ff", "prefill", "left");
        let answers = vec![asked(), draining, left, page("0100", "decode", "ready")];
        assert_eq!(changed(answers, 20).await.expect("it came back"), Exit::Ok);
        assert_eq!(changed(vec![asked()], 0).await.expect("asked"), Exit::Ok);
        let restarted = vec![asked(), page("0100", "prefill", "ready")];
        let error = changed(restarted, 20).await.expect_err("in its old role");
        assert!(error.to_string().contains("started anew"), "{error:#}");
    }

    #[tokio::test]
    async fn nothing_is_waited_for_when_it_has_the_role_or_cannot_have_it() {
        let has = r#"{"node": "prefill-1", "epoch": "00ff", "state": "ready", "role": "decode"}"#;
        let has = vec![Answer::with_status(PATH, "200 OK", has)];
        assert_eq!(changed(has, 20).await.expect("nothing to do"), Exit::Ok);
        let body = r#"{"error": {"message": "It can be a prefill node only."}}"#;
        let refused = vec![Answer::with_status(PATH, "409 Conflict", body)];
        let error = changed(refused, 20).await.expect_err("refused");
        assert_eq!(crate::exit::of(&error), Exit::Failure);
        assert!(error.to_string().contains("prefill node only"), "{error:#}");
    }
}
