//! Models of the user's own: what they are called, where they come from, and how requests name them.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Output;

use cli::local_cluster::LocalClusterOptions;
use integration_tests::cluster::{TestCluster, baton_executable};
use model_files::gguf::GgmlType;
use model_files::model::Model;
use model_files::test_kit::{TinyFolder, TinyModel};
use model_files::tokenizer::Tokenizer;
use serde_json::{Value, json};
use tokio::process::Command;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn write_tiny(path: &Path) {
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("it is made");
    TinyModel::default().build().write(path).expect("room for a tiny model");
}

/// As `baton up` would start it: nobody tells the processes a name.
fn options(model: PathBuf) -> LocalClusterOptions {
    let mut options = LocalClusterOptions::new(
        baton_executable().expect("baton"),
        "1p1d".parse().expect("a topology"),
        model,
    );
    options.settings.kv_cache_memory = Some("4MiB".to_owned());
    options.settings.threads_per_node = Some(1);
    options
}

async fn listed(cluster: &TestCluster) -> Vec<String> {
    let models = cluster
        .http
        .get(cluster.url("/v1/models"))
        .send()
        .await
        .expect("an answer");
    let models: Value = models.json().await.expect("JSON");
    let ids = models["data"].as_array().expect("a list").iter();
    ids.map(|model| model["id"].as_str().expect("an id").to_owned())
        .collect()
}

/// The answer's status and body; one token is enough.
async fn ask(cluster: &TestCluster, model: &str) -> (u16, Value) {
    let body = json!({"model": model, "prompt": "once", "max_tokens": 1, "ignore_eos": true, "include_metrics": true});
    let answer = cluster
        .http
        .post(cluster.url("/v1/completions"))
        .json(&body)
        .send()
        .await;
    let answer = answer.expect("an answer");
    (answer.status().as_u16(), answer.json().await.expect("JSON"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_served_under_its_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("My-Tiny.Q8_0.gguf");
    write_tiny(&file);
    let cluster = TestCluster::start_with(options(file)).await.expect("it starts");
    assert_eq!(listed(&cluster).await, ["My-Tiny.Q8_0"]);
    let (status, answer) = ask(&cluster, "My-Tiny.Q8_0").await;
    assert_eq!(
        (status, answer["model"].as_str()),
        (200, Some("My-Tiny.Q8_0")),
        "{answer}"
    );
    assert!(
        answer["metrics"]["prefill_node"].is_string(),
        "both nodes have joined under this name: {answer}"
    );
    let (status, answer) = ask(&cluster, "smollm2-135m").await;
    let code = answer["error"]["code"].as_str();
    assert_eq!((status, code), (404, Some("model_not_found")), "{answer}");
    cluster.stop().await.expect("stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_is_served_under_its_name() {
    let root = tempfile::tempdir().expect("a folder");
    let (file, folder) = (root.path().join("x.gguf"), root.path().join("my-folder"));
    let plain = TinyModel {
        matrix_kind: GgmlType::F16,
        ..TinyModel::default()
    };
    plain.build().write(&file).expect("room for a tiny model");
    std::fs::create_dir(&folder).expect("it is made");
    let model = Model::open(&file).expect("the kit's model is sound");
    TinyFolder {
        model: &model,
        shards: 2,
    }
    .write(&folder);
    let mut options = options(folder);
    options.settings.numerics = Some("exact".to_owned());
    let cluster = TestCluster::start_with(options).await.expect("it starts");
    assert_eq!(listed(&cluster).await, ["my-folder"]);
    let (status, answer) = ask(&cluster, "my-folder").await;
    assert_eq!((status, answer["model"].as_str()), (200, Some("my-folder")), "{answer}");
    assert!(answer["metrics"]["prefill_node"].is_string(), "{answer}");
    cluster.stop().await.expect("stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn several_names_are_served_and_the_first_is_in_the_answers() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("x.gguf");
    write_tiny(&file);
    let mut options = options(file);
    options.settings.served_model_name = ["first", "org/second", "first"].map(str::to_owned).into();
    let cluster = TestCluster::start_with(options).await.expect("it starts");
    assert_eq!(listed(&cluster).await, ["first", "org/second"]);
    for name in ["first", "org/second"] {
        let (status, answer) = ask(&cluster, name).await;
        assert_eq!((status, answer["model"].as_str()), (200, Some("first")), "{answer}");
    }
    let (status, answer) = ask(&cluster, "x").await;
    assert_eq!(status, 404, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("first") && message.contains("org/second"), "{answer}");
    cluster.stop().await.expect("stop");
}

/// A cache of the hub as other tools leave it: content by its hash, and links to it.
fn hub_cache(home: &Path) {
    let repository = home.join("hub/models--org--tiny");
    let (blob, snapshot) = (repository.join("blobs/abc"), repository.join("snapshots").join(COMMIT));
    write_tiny(&blob);
    std::fs::create_dir_all(&snapshot).expect("it is made");
    std::os::unix::fs::symlink("../../blobs/abc", snapshot.join("tiny-Q8_0.gguf")).expect("a link");
    std::fs::create_dir_all(repository.join("refs")).expect("it is made");
    std::fs::write(repository.join("refs/main"), COMMIT).expect("written");
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_find_a_model_of_the_hub_in_its_cache_without_a_network() {
    let home = tempfile::tempdir().expect("a folder");
    hub_cache(home.path());
    // The processes get the name, as with `baton serve-decode --model org/tiny:Q8_0` on a host of its own.
    let mut options = options(PathBuf::from("org/tiny:Q8_0"));
    let variable = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    options.environment = vec![
        variable("HF_HOME", home.path().to_str().expect("text")),
        variable("HF_HUB_CACHE", ""),
        variable("HF_HUB_OFFLINE", "1"),
    ];
    let cluster = TestCluster::start_with(options).await.expect("it starts");
    assert_eq!(listed(&cluster).await, ["tiny-Q8_0"]);
    let (status, answer) = ask(&cluster, "tiny-Q8_0").await;
    assert_eq!(status, 200, "{answer}");
    cluster.stop().await.expect("stop");
}

/// Runs the binary with a hub's cache of its own and no network.
async fn baton(home: &Path, arguments: &[&str]) -> Output {
    baton_with(home, arguments, &[]).await
}

/// With an `HF_ENDPOINT` the network may be used.
async fn baton_with(home: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(baton_executable().expect("baton"));
    command
        .args(arguments)
        .env("HF_HOME", home)
        .env_remove("HF_HUB_CACHE")
        .env("HF_HUB_OFFLINE", "1");
    command.envs(environment.iter().copied());
    command.kill_on_drop(true).output().await.expect("it runs")
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed_and_described_wherever_they_come_from() {
    let home = tempfile::tempdir().expect("a folder");
    hub_cache(home.path());
    let output = baton(home.path(), &["model", "list", "--json"]).await;
    assert!(output.status.success(), "{output:?}");
    let models: Vec<Value> = serde_json::from_slice(&output.stdout).expect("one JSON array");
    let named = |name: &str| {
        models
            .iter()
            .find(|model| model["name"] == name)
            .unwrap_or_else(|| panic!("{models:?}"))
    };
    let tiny = named("org/tiny:tiny-Q8_0.gguf");
    assert_eq!(
        (&tiny["architecture"], &tiny["state"]),
        (&json!("llama"), &json!("cached")),
        "{tiny}"
    );
    assert!(tiny["bytes"].as_u64() > Some(10_000), "{tiny}");
    named("smollm2-135m");
    let output = baton(home.path(), &["model", "inspect", "--json", "org/tiny"]).await;
    assert!(output.status.success(), "{output:?}");
    let described: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(described["served_name"], "tiny-Q8_0");
    // 2 layers, keys and values, 2 heads of 16, 2 bytes each.
    assert_eq!(
        described["memory"]["kv_bytes_per_token_int8_blocks"],
        2 * 2 * 2 * 16 * 2,
        "{described}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_is_not_here_is_told_with_the_folder_to_fill() {
    let home = tempfile::tempdir().expect("a folder");
    for arguments in [
        ["up", "--model", "org/none", "--listen", "127.0.0.1:0"],
        ["serve-decode", "--model", "org/none", "--listen", "127.0.0.1:0"],
    ] {
        let output = baton(home.path(), &arguments).await;
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let to_fill = home.path().join("hub/models--org--none");
        assert!(
            said.contains(to_fill.to_str().expect("text")) && said.contains("--model"),
            "{said}"
        );
    }
}

/// A hub with one file in one repository, which answers until the test's process ends. Its address.
fn hub_with(name: &str, content: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let page = json!({"sha": COMMIT, "siblings": [{"rfilename": name, "size": content.len()}]}).to_string();
    let file = format!("/org/tiny/resolve/{COMMIT}/{name}");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let first = lines.next().unwrap_or_default();
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            let (status, body) = match first.split(' ').nth(1) {
                Some("/api/models/org/tiny/revision/main?blobs=true") => (200, page.as_bytes()),
                Some(path) if path == file => (200, content.as_slice()),
                _ => (404, b"".as_slice()),
            };
            let head = format!(
                "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            // A client that has gone is its own loss.
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        }
    });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_fetched_from_the_hub_once_and_then_found_without_it() {
    let home = tempfile::tempdir().expect("a folder");
    let hub = hub_with("tiny-Q8_0.gguf", TinyModel::default().build().build());
    let online = [("HF_ENDPOINT", hub.as_str()), ("HF_HUB_OFFLINE", "0")];
    let output = baton_with(home.path(), &["model", "pull", "org/tiny:Q8_0"], &online).await;
    assert!(output.status.success(), "{output:?}");
    let path = String::from_utf8(output.stdout).expect("text");
    let snapshot = home.path().join("hub/models--org--tiny/snapshots").join(COMMIT);
    assert_eq!(Path::new(path.trim_end()), snapshot.join("tiny-Q8_0.gguf"));
    let output = baton(home.path(), &["model", "inspect", "--json", "org/tiny"]).await;
    assert!(output.status.success(), "{output:?}");
    // Two that are not there, and one that is no name: each with its own status.
    let output = baton_with(home.path(), &["model", "pull", "org/other"], &online).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let output = baton_with(home.path(), &["model", "pull", "org/tiny:Q4_0"], &online).await;
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let output = baton_with(home.path(), &["model", "pull", "gpt-17"], &online).await;
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exported_tokenizer_gives_the_same_ids() {
    let root = tempfile::tempdir().expect("a folder");
    let (file, folder) = (root.path().join("x.gguf"), root.path().join("made/here"));
    write_tiny(&file);
    let words = [
        "model",
        "export-tokenizer",
        file.to_str().expect("text"),
        folder.to_str().expect("text"),
    ];
    let output = baton(root.path(), &words).await;
    assert!(output.status.success(), "{output:?}");
    let model = Model::open(&file).expect("the kit's model is sound");
    let (own, exported) = (
        model.tokenizer().expect("a tokenizer"),
        Tokenizer::from_folder(&folder).expect("a tokenizer"),
    );
    for text in ["once upon a time", "<|im_start|>user\nüé😀<|im_end|>", "  1234\t"] {
        assert_eq!(
            own.encode(text, true).expect("ids"),
            exported.encode(text, true).expect("ids"),
            "{text:?}"
        );
    }
    let template = std::fs::read_to_string(folder.join("chat_template.jinja")).expect("a template");
    assert_eq!(template, model.chat_template().expect("a template").source());
}
