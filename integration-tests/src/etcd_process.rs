//! A real etcd as a child process that can be hurt: stopped, killed, started again with its data or without.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::wait::wait_until;

/// What `lease_s` says: TARGETS' test value.
pub const LEASE: Duration = Duration::from_secs(2);
/// etcd elects itself within a second; a busy machine takes a few.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);
/// One look at it; one that stands still does not answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
const CLUSTER: &str = "faults";
/// `etcd-membership/src/address.rs`: everything of one cluster is below this.
const FOLDER: &str = "/baton/faults/";

/// Killed when it is dropped.
#[derive(Debug)]
pub struct Etcd {
    child: Child,
    program: PathBuf,
    folder: TempDir,
    /// Each empty start has a folder of its own.
    data_count: u32,
    port: u16,
    peer_port: u16,
    http: reqwest::Client,
}

/// `$BATON_ETCD`, which scripts/get-etcd fetches; none when it is not set, so that a test can say that it was not run.
pub fn program() -> Option<PathBuf> {
    std::env::var_os("BATON_ETCD")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

impl Etcd {
    /// # Errors
    /// There is none, or it does not answer.
    pub async fn start() -> Result<Self> {
        let program = program()
            .context("BATON_ETCD is not set: run `scripts/get-etcd target/etcd` and set it to the path it prints")?;
        ensure!(program.is_file(), "BATON_ETCD={} is not there", program.display());
        let folder = tempfile::tempdir()?;
        let (port, peer_port) = (free_port()?, free_port()?);
        let etcd = Self {
            child: spawn(&program, (&folder, 0), (port, peer_port))?,
            program,
            folder,
            data_count: 0,
            port,
            peer_port,
            http: reqwest::Client::builder().timeout(ANSWER_LIMIT).build()?,
        };
        etcd.wait_until_it_answers().await?;
        Ok(etcd)
    }

    /// As processes are given it.
    pub fn address(&self) -> String {
        format!("etcd://127.0.0.1:{}/{CLUSTER}?lease_s={}", self.port, LEASE.as_secs())
    }

    /// # Errors
    /// Not within half a minute.
    pub async fn wait_until_it_answers(&self) -> Result<()> {
        wait_until("etcd answers", ANSWERS_WITHIN, || self.registered()).await?;
        Ok(())
    }

    /// Keys of the cluster that stand in it now.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn registered(&self) -> Result<Vec<String>> {
        // The first key behind the folder: its last byte, a slash, plus one.
        let end = format!("{}0", FOLDER.trim_end_matches('/'));
        let body = json!({"key": base64(FOLDER), "range_end": base64(&end), "keys_only": true});
        let url = format!("http://127.0.0.1:{}/v3/kv/range", self.port);
        let answer = self.http.post(url).json(&body).send().await?.error_for_status()?;
        let answer: Value = answer.json().await?;
        let keys = answer["kvs"].as_array().into_iter().flatten();
        Ok(keys.filter_map(|kv| kv["key"].as_str()).map(str::to_owned).collect())
    }

    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL; returns once it is gone.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub async fn kill(&mut self) -> Result<()> {
        self.child.kill().await.context("etcd cannot be killed")
    }

    /// After `kill`, at the same address; does not wait until it answers.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn restart(&mut self, keeps_data: bool) -> Result<()> {
        self.data_count += u32::from(!keeps_data);
        self.child = spawn(
            &self.program,
            (&self.folder, self.data_count),
            (self.port, self.peer_port),
        )?;
        Ok(())
    }

    fn signal(&self, signal: Signal) {
        let pid = self
            .child
            .id()
            .and_then(|pid| i32::try_from(pid).ok())
            .and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // Gone is as good as told.
            let _ = kill_process(pid, signal);
        }
    }
}

fn spawn(program: &PathBuf, (folder, data_count): (&TempDir, u32), (port, peer_port): (u16, u16)) -> Result<Child> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(folder.path().join("log"))?;
    let (client_url, peer_url) = (
        format!("http://127.0.0.1:{port}"),
        format!("http://127.0.0.1:{peer_port}"),
    );
    let mut command = Command::new(program);
    command
        .args(["--name", "faults", "--logger", "zap"])
        .arg("--data-dir")
        .arg(folder.path().join(format!("data-{data_count}")))
        .args([
            "--listen-client-urls",
            &client_url,
            "--advertise-client-urls",
            &client_url,
        ])
        .args([
            "--listen-peer-urls",
            &peer_url,
            "--initial-advertise-peer-urls",
            &peer_url,
        ])
        .args(["--initial-cluster", &format!("faults={peer_url}")])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .kill_on_drop(true);
    command
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))
}

/// RFC 4648, for etcd's JSON: a few keys are no reason for a dependency.
fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in text.as_bytes().chunks(3) {
        let bytes = [
            chunk[0],
            chunk.get(1).copied().unwrap_or(0),
            chunk.get(2).copied().unwrap_or(0),
        ];
        let word = u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]);
        for i in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * i)) as usize & 63];
            out.push(if i <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (text, expected) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(text), expected, "{text}");
        }
    }
}
