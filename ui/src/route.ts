// Where the page is: the part of the address after #, so that links and "back" work with no server.
import { useEffect, useState } from "preact/hooks";
import { address, type Query } from "./api";

export interface Route { page: string; query: URLSearchParams }

export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return { page: path, query: new URLSearchParams(query) };
}

export function link(page: string, query: Query = {}): string {
  return `#/${address(page, query)}`;
}

export function useRoute(): Route {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const moved = () => setHash(location.hash);
    window.addEventListener("hashchange", moved);
    return () => window.removeEventListener("hashchange", moved);
  }, []);
  return parse(hash);
}

/** Changes the address without a new entry in the history: for filters while they are typed. */
export function replace(where: string): void {
  history.replaceState(null, "", where);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}
