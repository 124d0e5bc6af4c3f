//! The input of `baton top`: the pages once and after each gap, and the stream in between.

use std::time::{Duration, Instant};

use coordinator::records::Page;
use coordinator::records::pages::ClusterPage;
use coordinator::records::shape::Summary;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::observe::client::AdminClient;
use crate::observe::feed::{BackOff, Feed, News};

/// The queue is full when drawing lags behind. Then the server reports missed events, and the pages are read again.
const UPDATES_MAX: usize = 1024;
/// The most entries of one page.
const RECORDS_MAX: usize = 1000;
/// A reader that is too slow for the stream must not ask for the pages all the time too.
const PAGES_AGAIN_AFTER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Pages {
    pub cluster: ClusterPage,
    pub running: Vec<Summary>,
    /// The newest requests first, as far as one page goes.
    pub ended: Vec<Summary>,
}

#[derive(Debug)]
pub enum Update {
    News(News),
    Pages(Box<Pages>),
}

/// The same pages as the server sends them.
pub async fn raw_pages(client: &AdminClient) -> anyhow::Result<Value> {
    let records = async |is_running: bool| -> anyhow::Result<Value> {
        let query = [("running", is_running.to_string()), ("limit", RECORDS_MAX.to_string())];
        let mut page = client.page(&["admin", "requests"], &query).await?;
        Ok(page.get_mut("records").map_or_else(|| json!([]), Value::take))
    };
    Ok(json!({
        "cluster": client.page(&["admin", "cluster"], &[]).await?,
        "running": records(true).await?,
        "ended": records(false).await?,
    }))
}

pub async fn read_pages(client: &AdminClient) -> anyhow::Result<Pages> {
    let records = async |is_running: bool| -> anyhow::Result<Vec<Summary>> {
        let query = [("running", is_running.to_string()), ("limit", RECORDS_MAX.to_string())];
        let page: Page = client.read(&["admin", "requests"], &query).await?;
        Ok(page.records)
    };
    Ok(Pages {
        cluster: client.read(&["admin", "cluster"], &[]).await?,
        running: records(true).await?,
        ended: records(false).await?,
    })
}

/// Dropping it ends the reading.
#[derive(Debug)]
pub struct Watch {
    updates: mpsc::Receiver<anyhow::Result<Update>>,
}

impl Watch {
    /// # Errors
    /// Nobody answers, or there are no such pages.
    pub async fn start(client: &AdminClient, back_off: BackOff) -> anyhow::Result<Self> {
        // The stream is opened before the pages are read, so that nothing that ends between the two is lost.
        let feed = Feed::connect(client, Vec::new(), back_off).await?;
        let pages = read_pages(client).await?;
        let (sender, updates) = mpsc::channel(UPDATES_MAX);
        tokio::spawn(forward(client.clone(), feed, pages, sender));
        Ok(Self { updates })
    }

    /// # Errors
    /// The stream is gone for good.
    pub async fn next(&mut self) -> anyhow::Result<Update> {
        let update = self.updates.recv().await;
        update.unwrap_or_else(|| Err(anyhow::anyhow!("the reader of the stream stopped")))
    }
}

async fn forward(client: AdminClient, mut feed: Feed, pages: Pages, sender: mpsc::Sender<anyhow::Result<Update>>) {
    if sender.send(Ok(Update::Pages(Box::new(pages)))).await.is_err() {
        return;
    }
    let mut pages_read_at = Instant::now();
    let mut has_gap = false;
    loop {
        let news = feed.next().await;
        let is_end = news.is_err();
        has_gap |= matches!(news, Ok(News::Missed(_) | News::Back));
        if sender.send(news.map(Update::News)).await.is_err() || is_end {
            return;
        }
        // The page of the cluster comes each second, so a gap is closed even when no request ends any more.
        if has_gap && pages_read_at.elapsed() > PAGES_AGAIN_AFTER {
            pages_read_at = Instant::now();
            if let Ok(pages) = read_pages(&client).await {
                has_gap = false;
                if sender.send(Ok(Update::Pages(Box::new(pages)))).await.is_err() {
                    return;
                }
            }
        }
    }
}
