//! What `baton up` prints on stdout when ready: the URL, the processes and their addresses, a line to try, how to stop.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;

use crate::http::{Client, first_model};
use crate::local_cluster::{ClusterSettings, LocalCluster, ProcessInfo};
use crate::observe::format::or_dash;
use crate::observe::table::{Cell, Table};
use crate::terminal::Terminal;

/// Each question is one local request to a process that has just reported ready.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize)]
pub struct Ready {
    pub url: String,
    pub model: String,
    pub processes: Vec<Row>,
    #[serde(skip)]
    asks_for_keys: bool,
    /// The file of the authority that clients have to trust.
    #[serde(skip)]
    ca: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub process: ProcessInfo,
    /// `None` for the coordinator, which computes nothing.
    pub threads: Option<u32>,
    pub kv_blocks: Option<u64>,
}

impl Ready {
    /// `model`: the name that is shown where the coordinator tells its names only to those who have a key.
    pub async fn collect(cluster: &LocalCluster, settings: &ClusterSettings, model: String) -> anyhow::Result<Self> {
        let client = cluster.client()?;
        let mut processes = Vec::new();
        for info in cluster.processes() {
            let is_node = info.role != "coordinator";
            // With certificates a node answers the coordinator and operators only.
            let kv_blocks = match is_node && settings.certs.is_none() {
                true => kv_blocks(&client, &info.address).await,
                false => None,
            };
            processes.push(Row {
                process: info,
                threads: settings.threads_per_node.filter(|_| is_node),
                kv_blocks,
            });
        }
        let url = cluster.base_url().to_owned();
        let ask = |path| client.get(format!("{url}{path}")).timeout(ANSWER_WITHIN).send();
        // Another page would count this question as a request without a key.
        let whose = ask("/session").await;
        let whose = whose.context("the coordinator is ready but does not say whether it asks for keys")?;
        let asks_for_keys = whose.status() == http::StatusCode::UNAUTHORIZED;
        let model = match asks_for_keys {
            true => model,
            false => {
                let listed = ask("/v1/models").await;
                let listed = listed.context("the coordinator is ready but does not list its models")?;
                first_model(listed, &url).await?.id
            }
        };
        Ok(Self {
            url,
            model,
            processes,
            asks_for_keys,
            ca: cluster.api_ca(),
        })
    }

    /// The cluster serves also when nobody reads this.
    ///
    /// # Errors
    /// Stdout takes nothing for another reason.
    pub fn print(&self, as_json: bool) -> anyhow::Result<()> {
        let text = if as_json {
            format!("{}\n", serde_json::to_string(self)?)
        } else {
            self.text()
        };
        crate::stdout::print_result(&text)
    }

    fn text(&self) -> String {
        let mut text = format!("\nbaton is ready: {}\n\n", self.url);
        let mut table = Table::new(&["name", "role", ">pid", "address", ">threads", ">KV blocks"]);
        for row in &self.processes {
            let process = &row.process;
            table.row(vec![
                Cell::new(&process.name),
                Cell::new(&process.role),
                process.pid.to_string().into(),
                Cell::new(&process.address),
                or_dash(row.threads).into(),
                or_dash(row.kv_blocks).into(),
            ]);
        }
        for line in table.render(Terminal::plain()).lines() {
            let _ = writeln!(text, "  {line}");
        }
        let _ = write!(
            text,
            "\nTry it:\n  {}\n  baton chat --url {}{}\n\n",
            self.curl(),
            self.url,
            self.trusting("--ca")
        );
        let _ = writeln!(
            text,
            "Any OpenAI client: base URL {}/v1, {}. Metrics: {}/metrics",
            self.url,
            match self.asks_for_keys {
                true => "a key of `baton keys create`",
                false => "any key",
            },
            self.url
        );
        text.push_str("Logs: baton logs, or baton logs NAME --follow for one process.\n");
        text.push_str("Stop: Ctrl-C drains and leaves no process behind; twice stops at once.\n");
        text
    }

    /// The flag of a client that names the authority.
    fn trusting(&self, flag: &str) -> String {
        let ca = self.ca.as_ref();
        ca.map_or_else(String::new, |ca| {
            format!(" {flag} {}", in_quotes(&ca.to_string_lossy()))
        })
    }

    fn curl(&self) -> String {
        let body = serde_json::json!({
            "model": self.model,
            "messages": [{"role": "user", "content": "Name the capital of France."}],
            "temperature": 0,
            "max_tokens": 32,
            "stream": true,
        });
        let body = in_quotes(&body.to_string());
        format!(
            "curl -sN{} {}/v1/chat/completions{} -H 'content-type: application/json' -d {body}",
            self.trusting("--cacert"),
            self.url,
            match self.asks_for_keys {
                true => " -H \"authorization: Bearer $BATON_API_KEY\"",
                false => "",
            },
        )
    }
}

/// The sum over all states. `None` when the node does not answer: the table is for people and must not make a good start
/// fail.
async fn kv_blocks(client: &Client, address: &str) -> Option<u64> {
    let answer = client
        .get(format!("http://{address}/metrics"))
        .timeout(ANSWER_WITHIN)
        .send()
        .await
        .ok()?;
    let text = answer.text().await.ok()?;
    let states = text.lines().filter(|line| line.starts_with("baton_kv_blocks{"));
    let counts = states.map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    let total: Option<f64> = counts.sum();
    // Block counts are small whole numbers; f64 holds them exactly.
    total.filter(|total| *total > 0.0).map(|total| total as u64)
}

/// As one word of a shell.
fn in_quotes(text: &str) -> String {
    // The single quote is the one character that would end the shell's quotes.
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready() -> Ready {
        let row = |name: &str, role: &str, threads| Row {
            process: ProcessInfo {
                name: name.to_owned(),
                role: role.to_owned(),
                pid: 12,
                address: "127.0.0.1:8000".to_owned(),
            },
            threads,
            kv_blocks: threads.map(|_| 1456),
        };
        Ready {
            url: "http://127.0.0.1:8000".to_owned(),
            model: "it's-a-model".to_owned(),
            processes: vec![
                row("coordinator", "coordinator", None),
                row("prefill-0", "prefill", Some(2)),
            ],
            asks_for_keys: false,
            ca: None,
        }
    }

    #[test]
    fn the_text_names_every_process_and_a_line_that_a_shell_takes() {
        let text = ready().text();
        for wanted in [
            "http://127.0.0.1:8000",
            "prefill-0",
            "1456",
            "curl -sN",
            "it'\\''s-a-model",
            "capital of France",
        ] {
            assert!(text.contains(wanted), "{wanted} in {text}");
        }
    }

    #[test]
    fn the_json_is_one_line_with_the_url() {
        let json = serde_json::to_string(&ready()).expect("it serialises");
        let read: serde_json::Value = serde_json::from_str(&json).expect("it reads back");
        assert_eq!(read["url"], "http://127.0.0.1:8000");
        assert!(!json.contains('\n'));
    }
}
