//! A real etcd as a child process, with a data folder and ports of its own.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::kit::within;

const START_LIMIT: Duration = Duration::from_secs(20);

pub struct Etcd {
    child: Child,
    folder: TempDir,
    data_count: u32,
    extra: Vec<String>,
    pub port: u16,
    peer_port: u16,
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its number").port()
}

impl Etcd {
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    pub async fn start_with(extra: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let extra: Vec<String> = extra.iter().map(|arg| (*arg).to_owned()).collect();
        let (port, peer_port) = (free_port(), free_port());
        let child = spawn(&folder, 0, &extra, (port, peer_port));
        let etcd = Self {
            child,
            folder,
            data_count: 0,
            extra,
            port,
            peer_port,
        };
        // With TLS the test's registration waits for it.
        if !is_tls(&etcd.extra) {
            etcd.ready().await;
        }
        etcd
    }

    pub fn address(&self) -> String {
        format!("etcd://127.0.0.1:{}/test", self.port)
    }

    pub async fn client(&self) -> Client {
        self.client_as(None).await.expect("a client")
    }

    /// With a time limit for each call, so that a test cannot hang on a paused etcd.
    pub async fn client_as(&self, user: Option<(&str, &str)>) -> Result<Client, etcd_client::Error> {
        let mut options = ConnectOptions::new().with_timeout(Duration::from_secs(5));
        if let Some((name, password)) = user {
            options = options.with_user(name, password);
        }
        Client::connect([format!("127.0.0.1:{}", self.port)], Some(options)).await
    }

    async fn ready(&self) {
        within(START_LIMIT, "etcd answers", || async {
            let mut client = self.client().await;
            client.get("any", None).await.ok()
        })
        .await;
    }

    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("reaped");
    }

    /// On the same ports, after `kill`.
    pub async fn restart(&mut self) {
        self.child = spawn(&self.folder, self.data_count, &self.extra, (self.port, self.peer_port));
        self.ready().await;
    }

    pub async fn restart_empty(&mut self) {
        self.data_count += 1;
        self.restart().await;
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("signalled");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(15).collect();
            eprintln!("etcd's last words, newest first:\n{}", tail.join("\n"));
        }
    }
}

fn is_tls(extra: &[String]) -> bool {
    extra.iter().any(|arg| arg == "--cert-file")
}

fn data(folder: &TempDir, data_count: u32) -> PathBuf {
    folder.path().join(format!("data-{data_count}"))
}

fn spawn(folder: &TempDir, data_count: u32, extra: &[String], (port, peer_port): (u16, u16)) -> Child {
    let binary = std::env::var("BATON_ETCD").unwrap_or_else(|_| {
        panic!("BATON_ETCD is not set: run `scripts/get-etcd target/etcd` and set BATON_ETCD to the path it prints")
    });
    let log = File::options()
        .create(true)
        .append(true)
        .open(folder.path().join("log"))
        .expect("a log file");
    let scheme = if is_tls(extra) { "https" } else { "http" };
    let client_url = format!("{scheme}://127.0.0.1:{port}");
    let peer_url = format!("http://127.0.0.1:{peer_port}");
    let mut command = Command::new(&binary);
    command
        .args(["--name", "test", "--logger", "zap"])
        .arg("--data-dir")
        .arg(data(folder, data_count))
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
        .args(["--initial-cluster", &format!("test={peer_url}")])
        .args(extra)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a second handle"))
        .stderr(log);
    command
        .spawn()
        .unwrap_or_else(|error| panic!("BATON_ETCD={binary}: {error}; run `scripts/get-etcd target/etcd`"))
}
