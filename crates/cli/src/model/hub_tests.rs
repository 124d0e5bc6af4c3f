//! The hub's cache and a server that stands in for the hub: what is found, fetched, resumed and refused.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread;

use model_files::gguf::hex;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const NEWER: &str = "89abcdef0123456789abcdef0123456789abcdef";
const FOLDER: FetchOptions = FetchOptions {
    force: false,
    quiet: true,
};
const FORCED: FetchOptions = FetchOptions {
    force: true,
    quiet: true,
};

/// What the stand-in does beside what the hub does.
#[derive(Clone, Default)]
struct Repository {
    files: BTreeMap<String, Vec<u8>>,
    commit: String,
    /// Bytes of a large file after which the connection ends.
    cuts_at: Option<usize>,
    /// Sends other bytes than the list promises.
    lies: bool,
    /// Answers only who has this token.
    token: Option<String>,
    /// The address of the server that has the large files.
    elsewhere: String,
}

/// Small files lie on the hub itself. Large ones (GGUF, safetensors) are sent from another place, as the real ones are.
struct Hub {
    address: String,
    repository: Arc<Mutex<Repository>>,
    /// Paths and ranges that were asked for.
    asked: Arc<Mutex<Vec<String>>>,
    folder: tempfile::TempDir,
}

impl Hub {
    fn new(files: &[(&str, &[u8])]) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let files = files
            .iter()
            .map(|(name, content)| ((*name).to_owned(), content.to_vec()));
        let hub = Hub {
            address: listener.local_addr().unwrap().to_string(),
            repository: Arc::new(Mutex::new(Repository {
                files: files.collect(),
                commit: COMMIT.to_owned(),
                elsewhere: other.local_addr().unwrap().to_string(),
                ..Repository::default()
            })),
            asked: Arc::default(),
            folder: tempfile::tempdir().unwrap(),
        };
        for listener in [listener, other] {
            let (repository, asked) = (Arc::clone(&hub.repository), Arc::clone(&hub.asked));
            // It ends with the test's process.
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let (repository, asked) = (Arc::clone(&repository), Arc::clone(&asked));
                    thread::spawn(move || serve(stream, &repository, &asked));
                }
            });
        }
        hub
    }

    fn settings(&self) -> HubSettings {
        HubSettings::of_test(format!("http://{}", self.address), self.folder.path().to_owned())
    }

    fn change(&self, change: impl FnOnce(&mut Repository)) {
        change(&mut self.repository.lock().unwrap());
    }

    fn fetch(&self, name: &str) -> Result<PathBuf, PullError> {
        self.fetch_with(name, &self.settings(), FOLDER)
    }

    fn fetch_with(&self, name: &str, settings: &HubSettings, options: FetchOptions) -> Result<PathBuf, PullError> {
        let interrupt = Interrupt::by_hand(Arc::new(AtomicBool::new(false)));
        let name = HubName::parse(name).unwrap();
        match cached(&name, settings, options.force)? {
            Some(path) => Ok(path),
            None => fetch(&name, settings, (options, &interrupt)),
        }
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join("models--org--tiny").join(path)
    }
}

/// One connection: answers requests until it ends.
fn serve(stream: TcpStream, repository: &Mutex<Repository>, asked: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let mut head: Vec<String> = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            match line.trim_end() {
                "" => break,
                line => head.push(line.to_owned()),
            }
        }
        let path = head[0].split(' ').nth(1).unwrap().to_owned();
        let header = |name: &str| {
            let found = head
                .iter()
                .find_map(|line| line.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case(name)));
            found.map(|(_, value)| value.to_owned())
        };
        let range = header("range");
        asked.lock().unwrap().push(match &range {
            Some(range) => format!("{path} {range}"),
            None => path.clone(),
        });
        let repository = repository.lock().unwrap().clone();
        let is_elsewhere = path.starts_with("/elsewhere/");
        let authorised = header("authorization");
        // The token must not leave the hub.
        assert!(!is_elsewhere || authorised.is_none());
        let is_refused = !is_elsewhere && repository.token.is_some() && authorised != repository.token;
        let answer = match is_refused {
            true => (401, Vec::new(), Vec::new()),
            false => answer(&repository, &path, range.as_deref()),
        };
        let (status, headers, body) = answer;
        let mut text = format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n", body.len());
        headers
            .iter()
            .for_each(|header| text.push_str(&format!("{header}\r\n")));
        let cut = repository.cuts_at.filter(|cut| is_elsewhere && *cut < body.len());
        let sent = cut.unwrap_or(body.len());
        let written = stream
            .write_all(format!("{text}\r\n").as_bytes())
            .and_then(|()| stream.write_all(&body[..sent]));
        if written.is_err() || cut.is_some() {
            return;
        }
    }
}

type Answer = (u16, Vec<String>, Vec<u8>);

fn answer(repository: &Repository, path: &str, range: Option<&str>) -> Answer {
    let is_large = |name: &str| name.ends_with(".gguf") || name.ends_with(".safetensors");
    let sha256 = |content: &[u8]| hex(&Sha256::digest(content));
    let not_found = (404, Vec::new(), Vec::new());
    if let Some(revision) = path.strip_prefix("/api/models/org/tiny/revision/") {
        let revision = revision.strip_suffix("?blobs=true").unwrap();
        if !["main", "v%2F1", repository.commit.as_str()].contains(&revision) {
            return not_found;
        }
        let siblings = repository.files.iter().map(|(name, content)| {
            let mut file = json!({"rfilename": name, "size": content.len(), "blobId": &sha256(content)[..40]});
            if is_large(name) {
                file["lfs"] = json!({"sha256": sha256(content), "size": content.len(), "pointerSize": 134});
            }
            file
        });
        let page = json!({"sha": repository.commit, "siblings": siblings.collect::<Vec<_>>()});
        return (200, Vec::new(), page.to_string().into_bytes());
    }
    let resolve = format!("/org/tiny/resolve/{}/", repository.commit);
    if let Some(name) = path.strip_prefix(&resolve) {
        let Some(content) = repository.files.get(name) else {
            return not_found;
        };
        if is_large(name) {
            let headers = vec![
                format!("Location: http://{}/elsewhere/{name}?signed=1", repository.elsewhere),
                format!("X-Linked-Etag: \"{}\"", sha256(content)),
                format!("X-Linked-Size: {}", content.len()),
            ];
            return (302, headers, Vec::new());
        }
        return (307, vec![format!("Location: /api/resolve-cache/{name}")], Vec::new());
    }
    if let Some(name) = path.strip_prefix("/api/resolve-cache/") {
        let content = repository.files[name].clone();
        let headers = vec![format!("ETag: \"{}\"", &sha256(&content)[..40])];
        return (200, headers, content);
    }
    let name = path
        .strip_prefix("/elsewhere/")
        .and_then(|name| name.strip_suffix("?signed=1"));
    let Some(content) = name.and_then(|name| repository.files.get(name)) else {
        return not_found;
    };
    let content: Vec<u8> = match repository.lies {
        true => content.iter().rev().copied().collect(),
        false => content.clone(),
    };
    let from = range.map(|range| {
        range
            .trim_start_matches("bytes=")
            .trim_end_matches('-')
            .parse::<usize>()
            .unwrap()
    });
    match from {
        None => (200, Vec::new(), content),
        Some(from) if from >= content.len() => (416, Vec::new(), Vec::new()),
        Some(from) => (206, Vec::new(), content[from..].to_vec()),
    }
}

const MODEL: &[u8] = b"weights, or what a test takes for them";

fn folder_hub() -> Hub {
    Hub::new(&[
        ("config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("chat_template.jinja", b"{{ x }}"),
        ("model.safetensors", MODEL),
        ("README.md", b"# not wanted"),
        ("pytorch_model.bin", b"not wanted"),
    ])
}

fn hub_error(result: Result<PathBuf, PullError>) -> HubError {
    match result {
        Err(PullError::Hub(error)) => *error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_folder_is_fetched_once_and_found_by_other_tools_and_without_a_network() {
    let hub = folder_hub();
    let path = hub.fetch("org/tiny").unwrap();
    assert_eq!(path, hub.path(&format!("snapshots/{COMMIT}")));
    let mut names: Vec<_> = fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "chat_template.jinja",
            "config.json",
            "model.safetensors",
            "tokenizer.json"
        ]
    );
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), MODEL);
    let blob = format!("../../blobs/{}", hex(&Sha256::digest(MODEL)));
    assert_eq!(fs::read_link(path.join("model.safetensors")).unwrap(), Path::new(&blob));
    assert_eq!(fs::read_to_string(hub.path("refs/main")).unwrap(), COMMIT);
    // Whoever may read a new file may read it, too.
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let new_file = hub.path("refs/new");
    fs::write(&new_file, "").unwrap();
    assert_eq!(mode(&hub.path("refs/main")), mode(&new_file));
    fs::remove_file(new_file).unwrap();
    assert_eq!(hub.asked().len(), 9, "the list, and for each of four files where it is");
    let offline = HubSettings {
        is_offline: true,
        ..hub.settings()
    };
    for options in [FOLDER, FORCED] {
        assert_eq!(hub.fetch_with("org/tiny", &offline, options).unwrap(), path);
    }
    assert_eq!(hub.fetch("org/tiny").unwrap(), path);
    assert_eq!(hub.fetch(&format!("org/tiny@{COMMIT}")).unwrap(), path);
    assert_eq!(hub.asked(), Vec::<String>::new());
    let left: Vec<_> = fs::read_dir(hub.path("blobs")).unwrap().collect();
    assert_eq!(left.len(), 4, "{left:?}");
}

#[test]
fn a_newer_revision_is_fetched_when_asked_for_and_keeps_what_has_not_changed() {
    let hub = folder_hub();
    let old = hub.fetch("org/tiny").unwrap();
    hub.change(|repository| {
        repository.commit = NEWER.to_owned();
        repository
            .files
            .insert("config.json".to_owned(), b"{\"new\": 1}".to_vec());
    });
    assert_eq!(hub.fetch("org/tiny").unwrap(), old);
    hub.asked();
    let new = hub.fetch_with("org/tiny", &hub.settings(), FORCED).unwrap();
    assert_eq!(fs::read(new.join("config.json")).unwrap(), b"{\"new\": 1}");
    assert_eq!(fs::read(new.join("model.safetensors")).unwrap(), MODEL);
    assert_eq!(hub.asked().len(), 3, "the list, and where one file is");
    assert_eq!(hub.fetch("org/tiny").unwrap(), new);
    assert_eq!(hub.fetch("org/tiny@v/1").unwrap(), new);
    assert_eq!(fs::read_to_string(hub.path("refs/v/1")).unwrap(), NEWER);
}

#[test]
fn one_gguf_file_of_several_is_chosen_and_a_split_one_comes_whole() {
    let hub = Hub::new(&[
        ("t-Q4_0.gguf", b"four"),
        ("sub/t-Q8_0-00001-of-00002.gguf", b"first"),
        ("sub/t-Q8_0-00002-of-00002.gguf", b"second"),
        ("config.json", b"{}"),
    ]);
    let error = hub_error(hub.fetch("org/tiny"));
    assert!(
        matches!(&error, HubError::Several { choices, .. } if choices.len() == 2),
        "{error}"
    );
    let error = hub_error(hub.fetch("org/tiny:Q6_K"));
    assert!(
        matches!(&error, HubError::NoSuchFile { choices, .. } if choices.len() == 2),
        "{error}"
    );
    let path = hub.fetch("org/tiny:q8_0").unwrap();
    assert_eq!(
        path,
        hub.path(&format!("snapshots/{COMMIT}/sub/t-Q8_0-00001-of-00002.gguf"))
    );
    assert_eq!(fs::read(&path).unwrap(), b"first");
    assert_eq!(
        fs::read(path.with_file_name("t-Q8_0-00002-of-00002.gguf")).unwrap(),
        b"second"
    );
    assert!(!path.parent().unwrap().with_file_name("t-Q4_0.gguf").exists());
    // It is the only one here, and nobody has to say its name again.
    assert_eq!(hub.fetch("org/tiny").unwrap(), path);
    let models: Vec<_> = HubCache::new(hub.folder.path().to_owned())
        .snapshots()
        .iter()
        .flat_map(Snapshot::models)
        .collect();
    assert_eq!(models.len(), 1);
    assert_eq!(models[0].1, path);
}

#[test]
fn a_download_goes_on_where_it_was_cut() {
    let hub = folder_hub();
    hub.change(|repository| repository.cuts_at = Some(10));
    let error = hub_error(hub.fetch("org/tiny"));
    assert!(
        matches!(&error, HubError::Cut { file, bytes: 10, .. } if file == "model.safetensors"),
        "{error}"
    );
    assert!(
        HubCache::new(hub.folder.path().to_owned())
            .find(&HubName::parse("org/tiny").unwrap())
            .is_none()
    );
    hub.asked();
    hub.change(|repository| repository.cuts_at = None);
    let path = hub.fetch("org/tiny").unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), MODEL);
    let asked = hub.asked();
    assert!(
        asked
            .iter()
            .any(|asked| asked.ends_with("model.safetensors?signed=1 bytes=10-")),
        "{asked:?}"
    );
    assert!(!asked.iter().any(|asked| asked.ends_with("config.json")), "{asked:?}");
}

/// As if so much of the model had arrived before.
fn keep_incomplete(hub: &Hub, content: &[u8]) -> PathBuf {
    let blobs = hub.path("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let file = blobs.join(format!("{}.incomplete", hex(&Sha256::digest(MODEL))));
    fs::write(&file, content).unwrap();
    file
}

/// Its process ended while the file had no name yet.
#[test]
fn a_file_that_is_all_there_is_not_asked_for_again() {
    let hub = folder_hub();
    let incomplete = keep_incomplete(&hub, MODEL);
    let path = hub.fetch("org/tiny").unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), MODEL);
    assert!(!incomplete.exists());
    let asked = hub.asked();
    assert!(
        !asked.iter().any(|asked| asked.contains("model.safetensors")),
        "{asked:?}"
    );
}

#[test]
fn what_was_kept_of_another_file_is_not_mixed_in() {
    let hub = folder_hub();
    let incomplete = keep_incomplete(&hub, b"something else");
    let error = hub_error(hub.fetch("org/tiny"));
    assert!(
        matches!(&error, HubError::WrongHash { file, .. } if file == "model.safetensors"),
        "{error}"
    );
    assert!(!incomplete.exists());
    // As long as the file, and longer: nothing is left to ask for, so it comes anew.
    for length in [MODEL.len(), MODEL.len() + 1] {
        let hub = folder_hub();
        keep_incomplete(&hub, &vec![0; length]);
        let path = hub.fetch("org/tiny").unwrap();
        assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), MODEL);
    }
}

#[test]
fn other_content_than_promised_is_refused_and_removed() {
    let hub = folder_hub();
    hub.change(|repository| repository.lies = true);
    let error = hub_error(hub.fetch("org/tiny"));
    let expected = hex(&Sha256::digest(MODEL));
    assert!(
        matches!(&error, HubError::WrongHash { expected: e, .. } if *e == expected),
        "{error}"
    );
    let left = fs::read_dir(hub.path("blobs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    assert!(
        !left
            .into_iter()
            .any(|name| name.to_str().unwrap().starts_with(&expected))
    );
}

#[test]
fn several_fetches_at_once_ask_for_each_file_once() {
    let hub = folder_hub();
    thread::scope(|scope| {
        let fetches: Vec<_> = (0..4).map(|_| scope.spawn(|| hub.fetch("org/tiny"))).collect();
        for fetch in fetches {
            let path = fetch.join().unwrap().unwrap();
            assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), MODEL);
        }
    });
    let asked = hub.asked();
    let count = |end: &str| asked.iter().filter(|asked| asked.ends_with(end)).count();
    assert_eq!((count("-cache/config.json"), count("?signed=1")), (1, 1), "{asked:?}");
}

#[test]
fn a_missing_and_a_private_repository_are_told_apart_and_a_token_opens_it() {
    let hub = folder_hub();
    assert!(matches!(
        hub_error(hub.fetch("org/tiny@no-such-branch")),
        HubError::NotFound { .. }
    ));
    assert!(matches!(hub_error(hub.fetch("org/other")), HubError::NotFound { name } if name == "org/other"));
    hub.change(|repository| repository.token = Some("Bearer right".to_owned()));
    assert!(matches!(
        hub_error(hub.fetch("org/tiny")),
        HubError::NotAllowed { status: 401, .. }
    ));
    let settings = HubSettings {
        token: Some("right".to_owned()),
        ..hub.settings()
    };
    assert!(hub.fetch_with("org/tiny", &settings, FOLDER).is_ok());
}

#[test]
fn without_a_network_the_error_names_the_folder_to_fill_and_the_reason() {
    let hub = folder_hub();
    let offline = HubSettings {
        is_offline: true,
        ..hub.settings()
    };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = format!("http://{}", taken.local_addr().unwrap());
    drop(taken);
    let unreachable = HubSettings {
        endpoint: closed.clone(),
        ..hub.settings()
    };
    for settings in [offline, unreachable] {
        let error = hub_error(hub.fetch_with("org/tiny", &settings, FOLDER));
        let HubError::Offline { name, folder, why } = &error else {
            panic!("{error}")
        };
        assert_eq!((name.as_str(), folder), ("org/tiny", &hub.path("")));
        match &**why {
            NoNetwork::Forbidden => assert!(settings.is_offline),
            NoNetwork::Unreachable { endpoint, .. } => assert_eq!(*endpoint, closed),
        }
        for advice in ["baton model pull org/tiny", "--model", "HF_HOME"] {
            assert!(error.to_string().contains(advice), "{error}");
        }
    }
    assert_eq!(hub.asked(), Vec::<String>::new());
}

#[test]
fn an_interrupt_ends_a_fetch() {
    let hub = folder_hub();
    let interrupt = Interrupt::by_hand(Arc::new(AtomicBool::new(true)));
    let name = HubName::parse("org/tiny").unwrap();
    let ended = fetch(&name, &hub.settings(), (FOLDER, &interrupt));
    assert!(matches!(ended, Err(PullError::Interrupted)));
}

#[test]
fn what_is_no_model_is_refused_before_anything_is_fetched() {
    let hub = Hub::new(&[("README.md", b"a data set")]);
    assert!(matches!(hub_error(hub.fetch("org/tiny")), HubError::NoModel { .. }));
    let hub = Hub::new(&[("config.json", b"{}"), ("model.safetensors", MODEL)]);
    let error = hub_error(hub.fetch("org/tiny"));
    assert!(
        matches!(error, HubError::Incomplete { .. }),
        "there is no tokenizer: {error}"
    );
}
