//! A coordinator whose API has a certificate, asked by the verbs of `baton` as a person asks it.

use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cli::http::Client;
use futures::future::join_all;
use identity::{Authority, in_days};
use integration_tests::cluster::{TestCluster, baton_executable};
use integration_tests::wait::wait_until;
use serde_json::json;
use tokio::process::Command;

use crate::identity::{SEEN_WITHIN, authority, hostile, process, with_certificates};

const CLIENTS: usize = 2;

/// A new certificate for the API, under the same files.
fn issue(authority: &Authority, days: u32) {
    let api = process("api/api").with_hosts([]).expect("hosts");
    authority.issue(&api, in_days(days)).expect("a certificate");
}

async fn baton(words: &[&str], (url, ca): (&str, Option<&Path>)) -> Output {
    let mut command = Command::new(baton_executable().expect("baton"));
    command.args(words).env("BATON_ENDPOINT", url).kill_on_drop(true);
    match ca {
        Some(ca) => command.env("BATON_CA", ca),
        None => command.env_remove("BATON_CA"),
    };
    let ended = tokio::time::timeout(SEEN_WITHIN, command.output()).await;
    ended.expect("it ends by itself").expect("it ran")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn verbs_ask_over_tls_and_streams_go_on_while_the_certificate_changes() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = authority(folder.path());
    issue(&authority, 1);
    let mut options = with_certificates(folder.path());
    options.settings.api_tls = true;
    let cluster = TestCluster::start_with(options).await.expect("a cluster");
    let url = cluster.cluster.base_url();
    assert!(url.starts_with("https://"), "{url}");
    let (ca, plain) = (authority.certificate(), url.replacen("https", "http", 1));
    let load = ["bench", "run", "--num-prompts=4", "--input-len=16", "--output-len=4"];
    for words in [&["status"][..], &["chat", "--max-tokens=4", "hello"], &load] {
        let output = baton(words, (url, Some(&ca))).await;
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        let untrusted = baton(words, (url, None)).await;
        assert!(!untrusted.status.success(), "{words:?}");
    }
    let untrusted = said(&baton(&["status"], (url, None)).await);
    assert!(untrusted.contains("BATON_CA"), "{untrusted}");
    let in_plain = said(&baton(&["status"], (&plain, None)).await);
    assert!(in_plain.contains("https://"), "{in_plain}");

    let client = cluster.cluster.client().expect("a client");
    rotate(&authority, (url, &client)).await;
    cluster.cluster.stop(SEEN_WITHIN).await;
}

/// Answers that go on while the certificate changes: their streams must not break.
async fn rotate(authority: &Authority, (url, client): (&str, &Client)) {
    let address = url.trim_start_matches("https://");
    let before = hostile::certificate_of(address).await;
    let (open, is_renewed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let body =
        json!({"model": "smollm2-135m", "prompt": vec![9; 70], "max_tokens": 300, "ignore_eos": true, "stream": true});
    let streams = join_all((0..CLIENTS).map(async |_| {
        while !is_renewed.load(Ordering::Relaxed) {
            let asked = client.post(format!("{url}/v1/completions")).json(&body).send().await;
            open.fetch_add(1, Ordering::Relaxed);
            let text = asked.expect("an answer").text().await.expect("it is not cut off");
            open.fetch_sub(1, Ordering::Relaxed);
            let events = text.matches("data: {").count();
            assert!(text.contains("data: [DONE]") && events >= 300, "{events} events");
        }
    }));
    let renewed = async {
        wait_until("streams", SEEN_WITHIN, || async {
            (open.load(Ordering::Relaxed) == CLIENTS)
                .then_some(())
                .ok_or("not all have begun")
        })
        .await
        .expect("streams");
        issue(authority, 2);
        let seen = wait_until("the new certificate", SEEN_WITHIN, || async {
            match hostile::certificate_of(address).await == before {
                true => Err("still the old one"),
                false => Ok(()),
            }
        });
        seen.await.expect("it is used");
        let open_then = open.load(Ordering::Relaxed);
        is_renewed.store(true, Ordering::Relaxed);
        open_then
    };
    let (_, open_then) = tokio::join!(streams, renewed);
    assert!(open_then > 0, "no stream was open then");
}
