//! `/`: a page for people with what the daemon holds and serves.

mod render;

use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{Html, IntoResponse, Response};
use serde::Deserialize;

use super::control::App;
use crate::engine::overview::PageNumbers;

/// Keeps the page to itself: it needs nothing from elsewhere, and whatever a name holds, nothing of it runs.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

/// Pages of the lists that are asked for.
#[derive(Debug, Default, Deserialize)]
pub struct Wanted {
    /// Of the images, from 1.
    page: Option<String>,
    /// Of the exports, from 1.
    exports: Option<String>,
}

/// Answers with the page.
pub async fn page(State(app): State<App>, Query(wanted): Query<Wanted>) -> Response {
    // People type these; what is no number is the first page.
    let number = |text: Option<String>| text.and_then(|text| text.parse().ok()).unwrap_or(1);
    let numbers = PageNumbers { images: number(wanted.page), exports: number(wanted.exports) };
    match app.engine.call(async move |engine| engine.overview(numbers).await).await {
        Ok(overview) => {
            let headers = [
                (header::CONTENT_SECURITY_POLICY, POLICY),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
                (header::REFERRER_POLICY, "no-referrer"),
                (header::CACHE_CONTROL, "no-store"),
            ];
            (headers, Html(render::render(&overview))).into_response()
        }
        Err(failure) => failure.into_response(),
    }
}
